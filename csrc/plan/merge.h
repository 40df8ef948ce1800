// Merges the inventories of all ranks: numbers their keys, finds equal boxes, and checks that the ranks agree.
#pragma once

#include <span>

#include "plan/layout.h"
#include "state/inventory.h"

namespace vescale_ckpt::plan {

// Throws Error (invalid), naming the key and the ranks, unless under each key all ranks have the same kind, dtype and
// shape; boxes lie within the shape, are equal or disjoint, and cover it. If the
// job has one rank, it may hold any part of it. The error tells the disagreement about the first key. Empty boxes are
// left out, except where a tensor has no other.
Layout merge(std::span<const state::Inventory> ranks, unsigned threads);

}  // namespace vescale_ckpt::plan
