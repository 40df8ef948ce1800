// Sets of ranks, each kept once: a mesh has few, however many boxes its ranks share.
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
  uint64_t begin(size_t set) const { return begins_[set]; }  // among the members of all sets
  size_t members() const { return ranks_.size(); }           // of all sets together

  // The number of the set of these ranks; sets are numbered in order of first appearance.
  uint32_t add(std::span<const Holder> holders);

 private:
  std::vector<uint32_t> ranks_;
  std::vector<uint64_t> begins_ = {0};
  NumberedStrings numbers_;       // of the sets, by the bytes of their ranks
  std::vector<uint32_t> wanted_;  // the ranks at hand
};

}  // namespace vescale_ckpt::plan
