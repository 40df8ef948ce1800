// Keeps each set of ranks once: a mesh has few sets, however many chunks its ranks share.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/numbered_strings.h"
#include "plan/layout.h"

namespace vescale_ckpt::plan {

class HolderSets {
 public:
  size_t size() const { return begins_.size() - 1; }
  std::span<const uint32_t> operator[](size_t set) const {
    return {ranks_.data() + begins_[set], begins_[set + 1] - begins_[set]};
  }
  uint64_t begin(size_t set) const { return begins_[set]; }  // index among the members of all sets
  size_t members() const { return ranks_.size(); }           // sum over all sets

  // Returns the number of the set of these ranks. Sets are numbered in the order of first appearance.
  uint32_t add(std::span<const Holder> holders) {
    new_ranks_.clear();
    for (const Holder& holder : holders) new_ranks_.push_back(holder.rank);
    const auto [set, is_new] =
        numbers_.add({reinterpret_cast<const char*>(new_ranks_.data()), new_ranks_.size() * sizeof(uint32_t)});
    if (is_new) {
      ranks_.insert(ranks_.end(), new_ranks_.begin(), new_ranks_.end());
      begins_.push_back(ranks_.size());
    }
    return set;
  }

 private:
  std::vector<uint32_t> ranks_;
  std::vector<uint64_t> begins_ = {0};
  NumberedStrings numbers_;          // numbers of the sets, by the bytes of their ranks
  std::vector<uint32_t> new_ranks_;  // the ranks of the present call of add
};

}  // namespace vescale_ckpt::plan
