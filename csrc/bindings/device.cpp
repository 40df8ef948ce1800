// Accelerators: which there are, and copies from and to them.
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "device/cuda.h"
#include "device/pack_image.h"
#include "device/page_lock.h"
#include "device/pipeline.h"
#include "error.h"

namespace vescale_ckpt::bindings {
namespace {

device::Accelerator& accelerator(int device) {
  std::string reason;
  device::CudaRuntime* runtime = device::cuda_runtime(reason);
  if (runtime == nullptr) throw Error::invalid(reason);
  return runtime->accelerator(device);
}

py::dict device_info() {
  std::string reason, version;
  std::vector<std::string> names;
  {
    const py::gil_scoped_release release;
    if (device::CudaRuntime* runtime = device::cuda_runtime(reason)) {
      version = runtime->version();
      for (int device = 0; device < runtime->device_count(); ++device) {
        names.push_back(runtime->accelerator(device).name());
      }
    }
  }
  py::dict result;
  result["runtime"] = version;
  result["devices"] = names;
  result["kernel"] = device::pack_image() != nullptr;
  result["reason"] = text(reason);
  return result;
}

bool copies_from_cuda() {
  std::string reason;
  return device::cuda_runtime(reason) != nullptr;
}

py::object device_of(uint64_t address) {
  std::string reason;
  device::CudaRuntime* runtime = device::cuda_runtime(reason);
  const auto device = runtime == nullptr ? std::nullopt : runtime->device_of(address);
  return device ? py::object(py::int_(*device)) : py::none();
}

// Its end may have to wait for the device: without the GIL.
struct DeviceCopies {
  DeviceCopies(int device, bool to_host, uint64_t slab_bytes)
      : pipeline(std::make_unique<device::Pipeline>(accelerator(device),
                                                    to_host ? device::Direction::to_host : device::Direction::to_device,
                                                    device::CopyLimits{.slab_bytes = slab_bytes})) {}
  ~DeviceCopies() {
    const py::gil_scoped_release release;
    pipeline.reset();
  }
  std::unique_ptr<device::Pipeline> pipeline;
};

void start(DeviceCopies& copies, const py::buffer& buffer, const std::vector<device::StreamHandle>& producers,
           uint64_t base, uint64_t piece_bytes, uint64_t alignment) {
  const Table table(buffer);
  const py::gil_scoped_release release;
  copies.pipeline->start(device::parse_device_table(table.values()), producers, {base, piece_bytes, alignment});
}

bool wait(DeviceCopies& copies, double seconds) {
  const py::gil_scoped_release release;
  return copies.pipeline->wait(std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000)));
}

std::unique_ptr<device::PageLock> page_lock(int device, uint64_t address, uint64_t bytes, uint64_t piece_bytes) {
  const py::gil_scoped_release release;
  const std::span<std::byte> memory(reinterpret_cast<std::byte*>(address), bytes);
  auto lock = std::make_unique<device::PageLock>(accelerator(device), memory, piece_bytes);
  const std::atomic<bool> stop{false};
  lock->lock(stop);
  return lock;
}

}  // namespace

void bind_device(py::module_& module) {
  module.def("device_info", &device_info, "the runtime, the names of its devices, or the reason why there are none");
  module.def("copies_from_cuda", &copies_from_cuda, py::call_guard<py::gil_scoped_release>(),
             "whether CUDA can be used, which it is from now on");
  module.def("cuda_was_started", &device::cuda_was_started, "whether this process ever asked for CUDA");
  module.def("device_of", &device_of, py::arg("address"), "the device that memory is on; None for the host's");

  py::class_<DeviceCopies>(module, "DeviceCopies")
      .def(py::init<int, bool, uint64_t>(), py::arg("device"), py::arg("to_host"),
           py::arg("slab_bytes") = device::CopyLimits{}.slab_bytes, py::call_guard<py::gil_scoped_release>())
      .def("start", &start, py::arg("table"), py::arg("producers"), py::arg("base") = 0, py::arg("piece_bytes") = 0,
           py::arg("alignment") = 1)
      .def("wait", &wait, py::arg("seconds"))
      .def_property_readonly("copied_bytes", [](const DeviceCopies& copies) { return copies.pipeline->copied_bytes(); })
      .def_property_readonly("total_bytes", [](const DeviceCopies& copies) { return copies.pipeline->total_bytes(); });

  py::class_<device::PageLock>(module, "PageLock")
      .def(py::init(&page_lock), py::arg("device"), py::arg("address"), py::arg("bytes"), py::arg("piece_bytes"))
      .def_property_readonly("locked_bytes", &device::PageLock::locked_bytes)
      .def_property_readonly("refusal", &device::PageLock::refusal);
}

}  // namespace vescale_ckpt::bindings
