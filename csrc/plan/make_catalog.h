// Makes the catalog of a planned save.
#pragma once

#include <cstdint>
#include <span>

#include "metadata/catalog.h"
#include "plan/assign.h"
#include "plan/layout.h"
#include "plan/local_plans.h"

namespace vescale_ckpt::plan {

// With `copies`, several nodes may write a chunk, and the catalog names one copy of each: that of `node`, or if `node`
// has none, that of the lowest node that has one. `nodes[rank]` is the node of the rank.
metadata::Catalog make_catalog(const Layout& layout, const Assignment& assignment, const LocalPlans& plans,
                               std::span<const uint32_t> nodes, uint32_t node, bool copies, unsigned threads);

}  // namespace vescale_ckpt::plan
