// Which tensors of a state lie in the same memory: tied weights, and views of one another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "state/tables.h"

namespace vescale_ckpt::state {

// Groups of items whose memory overlaps, counted from an item's first byte to its last. Each group has items of two
// keys or more: boxes of one key may interleave without sharing an element. Items and groups are in the order of the
// inventory.
std::vector<std::vector<size_t>> items_that_share_memory(const StateTables& state);

// Whether each tensor has memory and lies in it without a gap, its last dimension first, and no two of them overlap.
bool are_dense_and_apart(const TensorTable& tensors);

}  // namespace vescale_ckpt::state
