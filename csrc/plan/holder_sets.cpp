#include "plan/holder_sets.h"

namespace vescale_ckpt::plan {

uint32_t HolderSets::add(std::span<const Holder> holders) {
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

}  // namespace vescale_ckpt::plan
