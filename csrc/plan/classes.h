// Groups keys into classes: every rank has equal rows for all keys of a class, so that planning handles them once.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "plan/layout.h"
#include "state/inventory.h"

namespace vescale_ckpt::plan {

// Fills in the keys, classes and blocks of a layout: names, class_of, classes without chunks, shapes, key_lists,
// blocks, block_of. The traits of a class come from the first rank that has it.
void find_classes(std::span<const state::Inventory> ranks, Layout& layout);

}  // namespace vescale_ckpt::plan
