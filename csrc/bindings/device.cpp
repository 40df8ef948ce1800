// Accelerators: which there are.
#include <string>

#include "bindings/bindings.h"
#include "device/cuda.h"
#include "device/notes.h"

namespace vescale_ckpt::bindings {
namespace {

py::dict device_info() {
  std::string reason;
  without_gil([&] { return device::cuda_runtime(reason); });
  py::dict result;
  result["kernel_built"] = device::pack_image() != nullptr;
  result["reason"] = text(reason);
  return result;
}

bool copies_from_cuda(bool batches) {
  std::string reason;
  device::CudaRuntime* const runtime = device::cuda_runtime(reason);
  if (runtime != nullptr) runtime->enable_batches(batches);
  return runtime != nullptr;
}

}  // namespace

void bind_device(py::module_& module) {
  module.def("device_info", &device_info, "whether there is a kernel, and why CUDA cannot be used, empty if it can");
  module.def("copies_from_cuda", &copies_from_cuda, py::arg("batches") = true, py::call_guard<py::gil_scoped_release>(),
             "whether CUDA can be used, which it is from now on, with copies in batches or without");
  module.def("device_notes", &device::notes, "what the devices of this process refused so far, each once, in words");
  module.def("cuda_was_started", &device::cuda_was_started, "whether this process ever asked for CUDA");
}

}  // namespace vescale_ckpt::bindings
