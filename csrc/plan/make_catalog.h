// Makes the catalog of a planned save.
#pragma once

#include "metadata/catalog.h"
#include "plan/assign.h"
#include "plan/layout.h"
#include "plan/local_plans.h"

namespace vescale_ckpt::plan {

// Several nodes may write a chunk: the catalog names the copy of the lowest node that has one.
metadata::Catalog make_catalog(const Layout& layout, const Assignment& assignment, const LocalPlans& plans,
                               unsigned threads);

}  // namespace vescale_ckpt::plan
