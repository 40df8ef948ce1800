// Checks that boxes tile a tensor: each element is in exactly one box.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "plan/find_overlap.h"

namespace vescale_ckpt::plan {

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
