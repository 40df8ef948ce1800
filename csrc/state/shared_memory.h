// Which tensors of a state lie in the same memory: tied weights, and views of one another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "state/tables.h"

namespace vescale_ckpt::state {

// Groups of items whose memory overlaps, from their first byte to their last; of two and more keys each. Items and
// groups in the order of the inventory. Boxes of one key are never a group of their own: they interleave.
std::vector<std::vector<size_t>> items_that_share_memory(const StateTables& state);

}  // namespace vescale_ckpt::state
