// The level to which the loads of some ranks rise when more bytes are spread over them as evenly as possible.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

namespace vescale_ckpt {

// Returns the lowest level L in bytes with sum(max(0, L - load)) >= `bytes` over the ranks of `set`, which is not
// empty. `loads` has one entry for each rank of the job, not only for those of `set`; none is negative.
template <typename Bytes>
Bytes fill_level(std::span<const uint32_t> set, std::span<const Bytes> loads, Bytes bytes) {
  std::vector<Bytes> sorted;
  sorted.reserve(set.size());
  for (const uint32_t rank : set) sorted.push_back(loads[rank]);
  std::sort(sorted.begin(), sorted.end());
  for (size_t below = 1; below < sorted.size(); ++below) {  // ranks below the level
    const Bytes step = sorted[below] - sorted[below - 1], ranks = static_cast<Bytes>(below);
    if (step > 0 && step >= bytes / ranks + (bytes % ranks != 0)) {
      return sorted[below - 1] + bytes / ranks + (bytes % ranks != 0);
    }
    bytes -= step * ranks;
  }
  const auto ranks = static_cast<Bytes>(sorted.size());
  return sorted.back() + bytes / ranks + (bytes % ranks != 0);
}

}  // namespace vescale_ckpt
