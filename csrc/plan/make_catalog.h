// The catalog of a plan.
#pragma once

#include <cstdint>
#include <span>

#include "metadata/catalog.h"
#include "plan/assign.h"
#include "plan/layout.h"

namespace vescale_ckpt::plan {

// As `node` sees it, if `copies`: of boxes that several nodes write, its own copy, or where it has none that of the
// lowest node.
metadata::Catalog make_catalog(const Layout& layout, const Assignment& assignment, std::span<const uint32_t> nodes,
                               uint32_t node, bool copies);

}  // namespace vescale_ckpt::plan
