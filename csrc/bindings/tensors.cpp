// Torch's tensors, without torch's headers.
#include "bindings/bindings.h"

namespace vescale_ckpt {

void bind_tensors(py::module_&) {}

}  // namespace vescale_ckpt
