// Snapshots: the copies in memory that asynchronous saves are written from. Accelerators: which there are.
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "bindings/bindings.h"
#include "device/cuda.h"
#include "stage/snapshot.h"

namespace vescale_ckpt::bindings {
namespace {

// What Python holds: release() may come while other threads wait, which keep the snapshot until they are through.
class HeldSnapshot {
 public:
  HeldSnapshot(const py::buffer& buffer, uint64_t budget_bytes, unsigned threads, const py::buffer& device_buffer,
               const Producers& producers)
      : threads_(threads) {
    const Table table(buffer), devices(device_buffer);
    const py::gil_scoped_release release;
    stage::SnapshotDevices of_devices{devices.values(), stage_producers(producers), nullptr};
    std::vector<int> used;
    for (const stage::Producer& producer : of_devices.producers) used.push_back(producer.device);
    if (!used.empty()) of_devices.pipelines = &stage::cuda_pipelines(used);
    snapshot_ =
        std::make_shared<stage::Snapshot>(table.values(), budget_bytes, threads, stage::snapshot_arena(), of_devices);
  }

  std::shared_ptr<stage::Snapshot> get() const {
    if (!snapshot_) throw Error::invalid("the snapshot was released");
    return snapshot_;
  }

  void copy() const {
    const auto snapshot = get();
    const py::gil_scoped_release release;
    snapshot->copy(threads_);
  }

  void start() const {
    const auto snapshot = get();
    const py::gil_scoped_release release;
    snapshot->start(threads_);
  }

  void wait() const {
    const auto snapshot = get();
    const py::gil_scoped_release release;
    snapshot->wait();
  }

  py::bytes table() const { return bytes_of(get()->table()); }

  void release() {
    auto snapshot = std::move(snapshot_);
    const py::gil_scoped_release release;
    if (snapshot) snapshot->cancel();
    snapshot.reset();
  }

 private:
  std::shared_ptr<stage::Snapshot> snapshot_;  // guarded by the GIL
  unsigned threads_;
};

py::dict device_info() {
  std::string reason;
  without_gil([&] { return device::cuda_runtime(reason); });
  py::dict result;
  result["kernel_built"] = device::kernel_image() != nullptr;
  result["reason"] = text(reason);
  return result;
}

bool copies_from_cuda(bool batches) {
  std::string reason;
  device::CudaRuntime* const runtime = device::cuda_runtime(reason);
  if (runtime != nullptr) runtime->enable_batches(batches);
  return runtime != nullptr;
}

py::dict memory_dict() {
  const stage::SnapshotMemory memory = stage::snapshot_arena().memory();
  py::dict result;
  result["touched_bytes"] = memory.touched;
  result["in_use_bytes"] = memory.in_use;
  result["registered_bytes"] = memory.registered;
  return result;
}

}  // namespace

void bind_stage(py::module_& module) {
  // As a buffer it is its memory, which must not be used after release().
  py::class_<HeldSnapshot>(module, "Snapshot", py::buffer_protocol())
      .def(py::init<const py::buffer&, uint64_t, unsigned, const py::buffer&, const Producers&>(), py::arg("table"),
           py::arg("budget_bytes"), py::arg("threads"), py::arg("devices") = py::bytes(),
           py::arg("producers") = Producers())
      .def_property_readonly("first", [](const HeldSnapshot& held) { return held.get()->first(); })
      .def_property_readonly("bytes", [](const HeldSnapshot& held) { return held.get()->bytes(); })
      .def("copy", &HeldSnapshot::copy)
      .def("start", &HeldSnapshot::start)
      .def("wait", &HeldSnapshot::wait)
      .def("cancel", [](const HeldSnapshot& held) { held.get()->cancel(); })
      .def("table", &HeldSnapshot::table)
      .def("offsets", [](const HeldSnapshot& held) { return held.get()->offsets(); })
      .def_buffer([](const HeldSnapshot& held) {
        const std::span<std::byte> memory = held.get()->memory();
        return py::buffer_info(reinterpret_cast<uint8_t*>(memory.data()), static_cast<py::ssize_t>(memory.size()));
      })
      .def("release", &HeldSnapshot::release);

  module.def(
      "prepare_snapshots",
      [](uint64_t bytes, unsigned threads) { return stage::snapshot_arena().prepare(bytes, threads); },
      py::arg("bytes"), py::arg("threads"), py::call_guard<py::gil_scoped_release>());
  module.def(
      "prepare_devices",
      [](const std::vector<int>& devices) {
        if (!devices.empty()) stage::cuda_pipelines(devices).prepare(devices);
      },
      py::arg("devices"),
      "makes what snapshots need on these CUDA devices, and lets their memory be locked in the background, for all "
      "devices, and lie near these",
      py::call_guard<py::gil_scoped_release>());
  module.def("trim_snapshots", [] { stage::snapshot_arena().trim(); }, py::call_guard<py::gil_scoped_release>());
  module.def("snapshot_memory", &memory_dict);
  module.def("device_info", &device_info, "whether there is a kernel, and why CUDA cannot be used, empty if it can");
  module.def("copies_from_cuda", &copies_from_cuda, py::arg("batches") = true, py::call_guard<py::gil_scoped_release>(),
             "whether CUDA can be used, which it is from now on, with copies in batches or without");
  module.def("device_notes", &device::notes, "what the devices of this process refused so far, each once, in words");
  module.def("cuda_was_started", &device::cuda_was_started, "whether this process ever asked for CUDA");
}

}  // namespace vescale_ckpt::bindings
