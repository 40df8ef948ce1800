#include "plan/water.h"

#include <algorithm>
#include <cstdlib>

namespace vescale_ckpt::plan {
namespace {

constexpr uint64_t kMostSteps = uint64_t{1} << 26;  // members visited: bounds the time where sets overlap wildly
constexpr uint64_t kMostTurns = 64;
constexpr int64_t kSettled = 1000;  // a turn that moves less than this part of the level was the last

}  // namespace

int64_t fill_level(std::span<const uint32_t> set, std::span<const int64_t> loads, int64_t bytes) {
  std::vector<int64_t> sorted;
  sorted.reserve(set.size());
  for (const uint32_t rank : set) sorted.push_back(loads[rank]);
  std::sort(sorted.begin(), sorted.end());
  for (size_t under = 1; under < sorted.size(); ++under) {  // ranks under water
    const int64_t step = sorted[under] - sorted[under - 1], ranks = static_cast<int64_t>(under);
    if (step > 0 && step >= bytes / ranks + (bytes % ranks != 0)) {
      return sorted[under - 1] + bytes / ranks + (bytes % ranks != 0);
    }
    bytes -= step * ranks;
  }
  const auto ranks = static_cast<int64_t>(sorted.size());
  return sorted.back() + bytes / ranks + (bytes % ranks != 0);
}

std::vector<int64_t> pour(const HolderSets& sets, std::span<const uint32_t> order, std::span<const int64_t> bytes,
                          std::span<int64_t> loads) {
  std::vector<int64_t> poured(sets.members());
  const uint64_t affordable = kMostSteps / std::max<uint64_t>(1, sets.members());
  const uint64_t turns = sets.size() > 1 ? std::clamp<uint64_t>(affordable, 1, kMostTurns) : 1;
  bool moving = true;
  for (uint64_t turn = 0; turn < turns && moving; ++turn) {
    moving = false;
    for (const uint32_t set : order) {
      const std::span<const uint32_t> ranks = sets[set];
      int64_t* part = poured.data() + sets.begin(set);
      for (size_t i = 0; i < ranks.size(); ++i) loads[ranks[i]] -= part[i];
      const int64_t level = fill_level(ranks, loads, bytes[set]);
      int64_t left = bytes[set];
      for (size_t i = 0; i < ranks.size(); ++i) {
        const int64_t now = std::min(left, std::max<int64_t>(0, level - loads[ranks[i]]));
        left -= now;
        moving |= std::abs(now - part[i]) > level / kSettled;
        part[i] = now;
        loads[ranks[i]] += now;
      }
    }
  }
  return poured;
}

}  // namespace vescale_ckpt::plan
