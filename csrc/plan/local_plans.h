// The local plan of each rank: the pieces that it writes, in the order in which it writes them.
#pragma once

#include <cstdint>
#include <vector>

#include "base/large_vector.h"
#include "plan/assign.h"
#include "plan/layout.h"

namespace vescale_ckpt::plan {

struct LocalPlans {
  static constexpr size_t kRowWords = 4;  // item, dim (-1: the whole box), start, length

  LargeVector<uint32_t> pieces;     // indices into Assignment::pieces, rank after rank
  std::vector<uint64_t> first_row;  // of each rank, among the pieces; one more at the end
  std::vector<uint64_t> bytes;      // of each rank

  // The rows of one rank, kRowWords numbers each.
  std::vector<int64_t> of(uint32_t rank, const Assignment& assignment) const;
};

// Tensors before objects, each in the order of the rank's items, pieces of a box in that of their starts. Fills in
// AssignedPiece::row.
LocalPlans make_local_plans(const Layout& layout, Assignment& assignment, uint32_t ranks, unsigned threads);

}  // namespace vescale_ckpt::plan
