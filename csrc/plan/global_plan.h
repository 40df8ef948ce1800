// Plans a save from the inventories of all ranks: which rank writes which box, and the catalog of the checkpoint.
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
  // `inventories`: each rank's, packed and 8-aligned; not used after construction. Parts that ranks have in common may
  // be the same memory: they are then hashed once. The same inventories and options
  // give the same plan. Throws Error (invalid), naming keys and ranks, if what the ranks hold does not fit together:
  // see merge().
  // `hashes`: what Replicas takes. Boxes of keys whose replicas differ are not split.
  GlobalPlan(std::span<const state::InventoryParts> inventories, const PlanOptions& options,
             std::span<const std::span<const uint64_t>> hashes = {});

  uint32_t ranks() const { return static_cast<uint32_t>(nodes_.size()); }
  uint64_t rows() const { return local_plans_.rows(); }  // of all local plans

  // What `rank` writes: rows of item, dim (-1: the whole box), start, length. Made anew by each call.
  std::vector<int64_t> local_plan(uint32_t rank) const;
  uint64_t local_plan_words(uint32_t rank) const;
  void local_plan(uint32_t rank, std::span<int64_t> words) const;  // into memory for so many
  std::span<const uint64_t> bytes_by_rank() const { return local_plans_.bytes(); }

  // For the ranks to compare replicas at later saves: see Replicas. Made anew by each call.
  std::vector<std::byte> holders(uint32_t rank) const;
  std::span<const Difference> differences() const { return replicas_.differences(); }
  std::string_view key(uint32_t number) const { return layout_.names[number]; }

  // Made anew by each call. With Placement::local as `node` sees it, nodes being numbered in the order of their ids:
  // its own copies, and of what it does not hold those of the lowest node that does. Else all see the same.
  metadata::Catalog catalog(uint32_t node = 0) const;

 private:
  PlanOptions options_;
  std::vector<uint32_t> nodes_;  // of each rank
  uint32_t node_count_ = 0;
  unsigned threads_ = 1;
  Layout layout_;  // without the holders
  Replicas replicas_;
  Assignment assignment_;
  LocalPlans local_plans_;
};

}  // namespace vescale_ckpt::plan
