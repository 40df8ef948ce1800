#include "plan/holder_sets.h"

#include <algorithm>
#include <bit>

namespace vescale_ckpt::plan {

uint32_t HolderSets::add(std::span<const Holder> holders) {
  uint64_t hash = holders.size();
  for (const Holder& holder : holders) hash = (std::rotl(hash, 29) ^ holder.rank) * 0x9E3779B97F4A7C15;
  for (auto [at, end] = known_.equal_range(hash); at != end; ++at) {
    const auto same = [](uint32_t rank, const Holder& holder) { return rank == holder.rank; };
    const std::span<const uint32_t> ranks = (*this)[at->second];
    if (std::equal(ranks.begin(), ranks.end(), holders.begin(), holders.end(), same)) return at->second;
  }
  for (const Holder& holder : holders) ranks_.push_back(holder.rank);
  begins_.push_back(ranks_.size());
  const auto set = static_cast<uint32_t>(size() - 1);
  known_.emplace(hash, set);
  return set;
}

}  // namespace vescale_ckpt::plan
