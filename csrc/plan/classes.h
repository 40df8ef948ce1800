// Groups keys into classes: every rank has equal rows for all keys of a class, so that planning handles them once.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "plan/layout.h"
#include "state/inventory.h"

namespace vescale_ckpt::plan {

// Returns a number for each of `parts`; equal bytes get equal numbers, in the order of first appearance. Bytes are
// compared by a hash of 128 bits; bytes at one address are hashed once.
std::vector<uint32_t> number_contents(std::span<const std::span<const std::byte>> parts, unsigned threads);

// Fills in the keys, classes and blocks of a layout: names, class_of, classes without chunks, shapes, key_lists,
// blocks, block_of. The traits of a class come from the first rank that has it.
void find_classes(std::span<const state::Inventory> ranks, Layout& layout, unsigned threads);

}  // namespace vescale_ckpt::plan
