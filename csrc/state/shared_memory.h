// Finds tensors of a state that lie in the same memory: shared (tied) weights, and views of one another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "state/tables.h"

namespace vescale_ckpt::state {

// Returns groups of items whose memory overlaps between first and last byte. Each group has items of at least two keys,
// because chunks of one key may interleave without sharing an element. Items and groups are in the order of the
// inventory.
std::vector<std::vector<size_t>> items_that_share_memory(const StateTables& state);

// Whether each tensor has memory and is contiguous, and no two tensors overlap.
bool are_dense_and_apart(const TensorTable& tensors);

}  // namespace vescale_ckpt::state
