// Brings what the ranks hold together: interns their keys, finds equal boxes, and checks that the ranks agree.
#pragma once

#include <span>

#include "plan/hash.h"
#include "plan/layout.h"
#include "state/inventory.h"

namespace vescale_ckpt::plan {

// `names[rank]` is the hash of that rank's names_block(): ranks of equal names are translated once.
//
// Throws Error (invalid), naming the key and the ranks, unless under each key all ranks have the same kind, dtype and
// shape; boxes lie within the shape, are equal or disjoint, and cover it. A rank alone may hold any part of it. Of the
// disagreements, the one about the first key is told. Empty boxes count only where a tensor has nothing else.
Layout merge(std::span<const state::Inventory> ranks, std::span<const Hash128> names, unsigned threads);

}  // namespace vescale_ckpt::plan
