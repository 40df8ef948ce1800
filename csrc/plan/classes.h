// Finds keys of which every rank has equal rows, so that planning computes what follows from rows once for all of them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "plan/layout.h"
#include "state/inventory.h"

namespace vescale_ckpt::plan {

// Numbers the contents of `parts`, equal bytes equally, in the order of their first appearance. Bytes are compared by
// a hash of 128 bits; those at one address are hashed once.
std::vector<uint32_t> number_contents(std::span<const std::span<const std::byte>> parts, unsigned threads);

// Fills in all of the layout that says which keys and classes there are, and which blocks of ranks: names, class_of,
// classes without boxes, shapes, key_lists, blocks, block_of. Facts of a class are those of the first rank that has it.
void find_classes(std::span<const state::Inventory> ranks, Layout& layout, unsigned threads);

}  // namespace vescale_ckpt::plan
