// Accelerators: which there are.
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "device/cuda.h"
#include "device/notes.h"
#include "device/pack_image.h"

namespace vescale_ckpt::bindings {
namespace {

py::dict device_info() {
  std::string reason, version;
  std::vector<std::string> names;
  bool kernel = false;
  {
    const py::gil_scoped_release release;
    if (device::CudaRuntime* runtime = device::cuda_runtime(reason)) {
      version = runtime->version();
      for (int device = 0; device < runtime->device_count(); ++device) names.push_back(runtime->device_name(device));
      kernel = runtime->accelerator(runtime->current_device()).has_kernel();
    }
  }
  py::dict result;
  result["runtime"] = version;
  result["devices"] = names;
  result["kernel_built"] = device::pack_image() != nullptr;
  result["kernel"] = kernel;
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
  module.def("device_info", &device_info,
             "the runtime, the names of its devices, whether the current one takes the kernel, or the reason why there "
             "are none; memory is taken on the current device only, for CUDA's context");
  module.def("copies_from_cuda", &copies_from_cuda, py::arg("batches") = true, py::call_guard<py::gil_scoped_release>(),
             "whether CUDA can be used, which it is from now on, with copies in batches or without");
  module.def("device_notes", &device::notes, "what the devices of this process refused so far, each once, in words");
  module.def("cuda_was_started", &device::cuda_was_started, "whether this process ever asked for CUDA");
}

}  // namespace vescale_ckpt::bindings
