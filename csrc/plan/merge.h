// Merges the inventories of all ranks: numbers their keys, finds equal chunks, and checks that the ranks agree.
#pragma once

#include <span>

#include "plan/layout.h"
#include "state/inventory.h"

namespace vescale_ckpt::plan {

// Throws Error (invalid) with the key and the ranks unless all ranks have the same kind, dtype and shape under each
// key, and chunks lie within the shape, are equal or disjoint, and cover it. The only rank of a job may hold any part
// of the shape. The error is about the first wrong key. Leaves out empty chunks, unless a tensor has no other.
Layout merge(std::span<const state::Inventory> ranks, unsigned threads);

}  // namespace vescale_ckpt::plan
