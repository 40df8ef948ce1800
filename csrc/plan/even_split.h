// Computes the most even split of bytes over the ranks that could write them, treating bytes as divisible.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "plan/holder_sets.h"

namespace vescale_ckpt::plan {

// Distributes bytes[set] over the ranks of each set, in the `order` of the sets, and adds what each rank gets to
// `loads`, which has one entry for each rank of the job. Returns the bytes that each member of each set got, set after
// set as in HolderSets. Sets that share ranks are distributed again, in turns, until a turn changes little: each turn
// lowers the sum of the squares of the loads, whose minimum is the most even split. The number of turns is bounded.
std::vector<int64_t> split_evenly(const HolderSets& sets, std::span<const uint32_t> order,
                                  std::span<const int64_t> bytes, std::span<int64_t> loads);

}  // namespace vescale_ckpt::plan
