// Checks that boxes tile a tensor: each element is in exactly one box.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace vescale_ckpt::plan {

// Boxes of one tensor: offset[ndim], size[ndim] of each box.
struct Boxes {
  const int64_t* words;
  uint32_t ndim;

  const int64_t* offset(size_t box) const { return words + box * 2 * ndim; }
  const int64_t* size(size_t box) const { return offset(box) + ndim; }
};

// Returns two of the boxes begin .. end that overlap, if any do; the same two on every run. No box may be empty, or
// without dimensions. A box is compared with those that lie beside it along one dimension, that with the most different
// offsets.
std::optional<std::pair<size_t, size_t>> find_overlap(const Boxes& boxes, size_t begin, size_t end);

struct Tiling {
  std::optional<std::pair<size_t, size_t>> overlap;  // two boxes that share elements
  uint64_t missing = 0;                              // elements in no box; unknown if boxes overlap
  // A box of missing elements for the message. Both are empty if a search would be slow.
  std::vector<int64_t> hole_offset, hole_size;
};

// There are `count` boxes, which are not empty, lie within `shape`, and are sorted by their offsets, which all differ.
// The check is linear for boxes that cut a tensor into slabs, the slabs into bars, and so on, as meshes of ranks do.
// For others it takes as long as find_overlap.
Tiling check_tiling(std::span<const int64_t> shape, const Boxes& boxes, size_t count);

}  // namespace vescale_ckpt::plan
