#include "plan/global_plan.h"

#include <algorithm>
#include <string>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/workers.h"

namespace vescale_ckpt::plan {
namespace {

constexpr size_t kBytesOfAThread = size_t{1} << 20;  // fewer bytes are not worth a thread
constexpr size_t kMostThreads = 8;

unsigned thread_count(std::span<const state::InventoryParts> inventories) {
  size_t bytes = 0;
  for (const state::InventoryParts& parts : inventories) {
    bytes += parts.rows.size() + parts.numbers.size() + parts.names.size();
  }
  const size_t processors = std::max(1u, std::thread::hardware_concurrency());
  return static_cast<unsigned>(std::min({processors, kMostThreads, bytes / kBytesOfAThread + 1}));
}

}  // namespace

GlobalPlan::GlobalPlan(std::span<const state::InventoryParts> inventories, const PlanOptions& options,
                       std::span<const std::span<const uint64_t>> hashes) {
  if (inventories.empty()) throw Error::invalid("a plan needs at least one rank");
  if (inventories.size() >= UINT32_MAX) throw Error::invalid("more than 4 billion ranks");
  const size_t ranks = inventories.size();
  threads_ = thread_count(inventories);

  std::vector<state::Inventory> parsed(ranks);
  parallel_for(threads_, ranks, 1, [&] {
    return [&](size_t rank) {
      try {
        parsed[rank] = state::Inventory(inventories[rank]);
      } catch (const Error& error) {
        throw Error::invalid("rank " + std::to_string(rank) + ": " + error.what());
      }
    };
  });

  std::vector<int64_t> ids;
  for (const state::Inventory& inventory : parsed) ids.push_back(inventory.node());
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  nodes_.reserve(ranks);
  for (const state::Inventory& inventory : parsed) {
    nodes_.push_back(static_cast<uint32_t>(std::lower_bound(ids.begin(), ids.end(), inventory.node()) - ids.begin()));
  }

  layout_ = merge(parsed, threads_);
  replicas_ = Replicas(layout_, hashes);
  assignment_ = assign(layout_, nodes_, replicas_.differs(), options);
  layout_.holders = {};
  layout_.first_holder = {};
  local_plans_ = LocalPlans(layout_, assignment_, this->ranks());
}

uint64_t GlobalPlan::local_plan_words(uint32_t rank) const {
  if (rank >= ranks()) throw Error::invalid("no rank " + std::to_string(rank) + " in this plan");
  return local_plans_.rows(rank) * LocalPlans::kRowWords;
}

void GlobalPlan::local_plan(uint32_t rank, std::span<int64_t> words) const {
  int64_t* at = words.data();
  for_each_row(layout_, assignment_, rank, [&](uint32_t item, uint32_t, uint32_t, const Assignment::Split* split) {
    at[0] = item;
    at[1] = split == nullptr ? -1 : split->dim;
    at[2] = split == nullptr ? 0 : split->start;
    at[3] = split == nullptr ? 0 : split->length;
    at += LocalPlans::kRowWords;
  });
}

std::vector<std::byte> GlobalPlan::holders(uint32_t rank) const {
  if (rank >= ranks()) throw Error::invalid("no rank " + std::to_string(rank) + " in this plan");
  return replicas_.holders(layout_, rank);
}

metadata::Catalog GlobalPlan::catalog() const {
  return make_catalog(layout_, assignment_, local_plans_, threads_);
}

}  // namespace vescale_ckpt::plan
