// Finds two boxes that share an element, in any number of dimensions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>

namespace vescale_ckpt::plan {

// Boxes of one tensor: offset[ndim], size[ndim] of each box.
struct Boxes {
  const int64_t* words;
  uint32_t ndim;

  const int64_t* offset(size_t box) const { return words + box * 2 * ndim; }
  const int64_t* size(size_t box) const { return offset(box) + ndim; }
};

// Returns two of the boxes begin .. end that overlap, if any do; the same two on every run. No box may be empty. Takes
// n (log n)^d steps for n boxes that differ in d dimensions.
std::optional<std::pair<size_t, size_t>> find_overlap(const Boxes& boxes, size_t begin, size_t end);

}  // namespace vescale_ckpt::plan
