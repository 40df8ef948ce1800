// Planning.
#include "bindings/bindings.h"

namespace vescale_ckpt {

void bind_plan(py::module_&) {}

}  // namespace vescale_ckpt
