#include "plan/even_split.h"

#include <algorithm>
#include <cstdlib>

#include "base/fill_level.h"

namespace vescale_ckpt::plan {
namespace {

constexpr uint64_t kMostSteps = uint64_t{1} << 26;  // so many members are visited at most, also if many sets overlap
constexpr uint64_t kMostTurns = 64;
constexpr int64_t kSettled = 1000;  // the last turn moves less than 1/1000 of the level

}  // namespace

std::vector<int64_t> split_evenly(const HolderSets& sets, std::span<const uint32_t> order,
                                  std::span<const int64_t> bytes, std::span<int64_t> loads) {
  std::vector<int64_t> split(sets.members());
  const uint64_t affordable = kMostSteps / std::max<uint64_t>(1, sets.members());
  const uint64_t turns = sets.size() > 1 ? std::clamp<uint64_t>(affordable, 1, kMostTurns) : 1;
  bool moving = true;
  for (uint64_t turn = 0; turn < turns && moving; ++turn) {
    moving = false;
    for (const uint32_t set : order) {
      const std::span<const uint32_t> ranks = sets[set];
      int64_t* part = split.data() + sets.begin(set);
      for (size_t i = 0; i < ranks.size(); ++i) loads[ranks[i]] -= part[i];
      const int64_t level = fill_level<int64_t>(ranks, loads, bytes[set]);
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
  return split;
}

}  // namespace vescale_ckpt::plan
