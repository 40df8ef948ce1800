// How many bytes each rank should get of what several could write, so that all are as even as can be, were bytes sand.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "plan/holder_sets.h"

namespace vescale_ckpt::plan {

// The level to which the ranks of one set are filled by `bytes` more: the lowest L with sum(max(0, L - load)) >= bytes.
// `loads` is of all ranks.
int64_t fill_level(std::span<const uint32_t> set, std::span<const int64_t> loads, int64_t bytes);

// Pours bytes[set] over the ranks of each set, on top of `loads`, which it raises by what it pours. Returns what each
// member of each set got. Sets that share ranks are poured again in turn until they have settled: each turn lowers the
// sum of the squares of the loads, whose minimum is the most even distribution.
std::vector<int64_t> pour(const HolderSets& sets, std::span<const uint32_t> order, std::span<const int64_t> bytes,
                          std::span<int64_t> loads);

}  // namespace vescale_ckpt::plan
