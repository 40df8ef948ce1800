// The indices that two ranges of one dimension share. Two n-d boxes overlap where their ranges do in each dimension.
#pragma once

#include <algorithm>
#include <cstdint>

namespace vescale_ckpt {

struct Overlap {
  int64_t begin, end;

  bool empty() const { return begin >= end; }
  int64_t size() const { return end - begin; }  // wrong if empty
};

// Where a range of `size` indices from `offset` on ends. Ends that do not fit in 64 bits wrap: callers may pass values
// that they have not checked, and get a wrong overlap for them.
inline int64_t end_of(int64_t offset, int64_t size) {
  return static_cast<int64_t>(static_cast<uint64_t>(offset) + static_cast<uint64_t>(size));
}

inline Overlap overlap(int64_t offset_a, int64_t size_a, int64_t offset_b, int64_t size_b) {
  return {std::max(offset_a, offset_b), std::min(end_of(offset_a, size_a), end_of(offset_b, size_b))};
}

}  // namespace vescale_ckpt
