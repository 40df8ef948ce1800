#include "plan/holder_sets.h"

namespace vescale_ckpt::plan {

uint32_t HolderSets::add(std::span<const Holder> holders) {
  wanted_.clear();
  for (const Holder& holder : holders) wanted_.push_back(holder.rank);
  const auto [set, is_new] =
      numbers_.add({reinterpret_cast<const char*>(wanted_.data()), wanted_.size() * sizeof(uint32_t)});
  if (is_new) {
    ranks_.insert(ranks_.end(), wanted_.begin(), wanted_.end());
    begins_.push_back(ranks_.size());
  }
  return set;
}

}  // namespace vescale_ckpt::plan
