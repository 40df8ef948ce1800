// Plans a save from the inventories of all ranks: which rank writes which chunk, and the catalog of the checkpoint.
// Immutable, hence thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "metadata/catalog.h"
#include "plan/assign.h"
#include "plan/layout.h"
#include "plan/local_plans.h"
#include "plan/replicas.h"
#include "state/inventory.h"

namespace vescale_ckpt::plan {

class GlobalPlan {
 public:
  // `inventories`: one of each rank, packed and 8-aligned; not used after construction. Equal parts may be the same
  // memory; then they are hashed once. The same inventories and options give the same plan. Throws Error (invalid) with
  // keys and ranks if the inventories do not fit together: see merge().
  // `hashes`: see Replicas. Chunks of keys whose replicas differ are not split.
  GlobalPlan(std::span<const state::InventoryParts> inventories, const PlanOptions& options,
             std::span<const std::span<const uint64_t>> hashes = {});

  uint32_t ranks() const { return static_cast<uint32_t>(nodes_.size()); }

  // Fills `words`, of local_plan_words, with the local plan of `rank`: rows of item, dim (-1: the whole chunk), start,
  // length. Each call computes it.
  void local_plan(uint32_t rank, std::span<int64_t> words) const;
  uint64_t local_plan_words(uint32_t rank) const;

  // Returns what the rank needs to compare replicas at later saves: see Replicas. Each call computes it.
  std::vector<std::byte> holders(uint32_t rank) const;
  std::span<const Difference> differences() const { return replicas_.differences(); }
  std::string_view key(uint32_t number) const { return layout_.names[number]; }

  // Returns the catalog of the checkpoint. Each call computes it. With Placement::local it names the copy of each chunk
  // on the lowest node that holds it. Nodes are numbered in the order of their ids.
  metadata::Catalog catalog() const;

 private:
  std::vector<uint32_t> nodes_;  // node of each rank
  unsigned threads_ = 1;
  Layout layout_;  // without the holders
  Replicas replicas_;
  Assignment assignment_;
  LocalPlans local_plans_;
};

}  // namespace vescale_ckpt::plan
