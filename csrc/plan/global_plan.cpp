#include "plan/global_plan.h"

#include <algorithm>
#include <string>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/parallel.h"
#include "plan/hash.h"
#include "plan/make_catalog.h"
#include "plan/merge.h"
#include "state/inventory.h"

namespace vescale_ckpt::plan {
namespace {

constexpr size_t kBytesOfAThread = size_t{1} << 20;  // less is not worth one
constexpr size_t kMostThreads = 8;

unsigned thread_count(std::span<const std::span<const std::byte>> inventories) {
  size_t bytes = 0;
  for (const auto inventory : inventories) bytes += inventory.size();
  const size_t processors = std::max(1u, std::thread::hardware_concurrency());
  return static_cast<unsigned>(std::min({processors, kMostThreads, bytes / kBytesOfAThread + 1}));
}

}  // namespace

GlobalPlan::GlobalPlan(std::span<const std::span<const std::byte>> inventories, const PlanOptions& options)
    : options_(options) {
  if (inventories.empty()) throw Error::invalid("a plan needs at least one rank");
  if (inventories.size() >= UINT32_MAX) throw Error::invalid("more than 4 billion ranks");
  const size_t ranks = inventories.size();
  const unsigned threads = thread_count(inventories);

  std::vector<state::Inventory> parsed(ranks);
  std::vector<Hash128> names(ranks);
  parallel_for(threads, ranks, 1, [&] {
    return [&](size_t rank) {
      try {
        parsed[rank] = state::Inventory(inventories[rank]);
      } catch (const Error& error) {
        throw Error::invalid("rank " + std::to_string(rank) + ": " + error.what());
      }
      names[rank] = hash128(parsed[rank].names_block());
    };
  });

  std::vector<int64_t> ids;
  for (const state::Inventory& inventory : parsed) ids.push_back(inventory.node());
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  node_count_ = static_cast<uint32_t>(ids.size());
  nodes_.reserve(ranks);
  for (const state::Inventory& inventory : parsed) {
    nodes_.push_back(static_cast<uint32_t>(std::lower_bound(ids.begin(), ids.end(), inventory.node()) - ids.begin()));
  }

  layout_ = merge(parsed, names, threads);
  assignment_ = assign(layout_, nodes_, options);
  layout_.holders = {};
  layout_.first_holder = {};
  local_plans_ = make_local_plans(layout_, assignment_, this->ranks(), threads);
}

std::vector<int64_t> GlobalPlan::local_plan(uint32_t rank) const {
  if (rank >= ranks()) throw Error::invalid("no rank " + std::to_string(rank) + " in this plan");
  return local_plans_.of(rank, assignment_);
}

metadata::Catalog GlobalPlan::catalog(uint32_t node) const {
  if (node >= node_count_) throw Error::invalid("no node " + std::to_string(node) + " in this plan");
  return make_catalog(layout_, assignment_, nodes_, node, options_.placement == Placement::local);
}

}  // namespace vescale_ckpt::plan
