// What the bindings share. Only bindings know Python: they convert, release the GIL, call, convert back, and decide
// nothing.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/transfer.h"
#include "read/reader.h"
#include "stage/device_load.h"
#include "state/inventory.h"

namespace vescale_ckpt::bindings {

namespace py = pybind11;

void bind_bytes(py::module_& module);         // format, io: files made of pieces; archives
void bind_engine(py::module_& module);        // io, read, write: bytes between memory and files
void bind_export(py::module_& module);        // hf, write: sets of safetensors files that all ranks write
void bind_index(py::module_& module);         // metadata: `.metadata`, its index, load plans
void bind_inventory(py::module_& module);     // state: what a rank holds
void bind_plan(py::module_& module);          // plan: which rank writes what
void bind_remote(py::module_& module);        // io: files of object stores
void bind_routes(py::module_& module);        // share: which rank reads what for others; copies from pieces to tensors
void bind_safetensors(py::module_& module);   // hf: safetensors files
void bind_stage(py::module_& module);         // stage, device: snapshots in memory, accelerators
void bind_state_form(py::module_& module);    // state: the form of nested states
void bind_tensors(py::module_& module);       // state: where torch's tensors are
void bind_tensor_facts(py::module_& module);  // state: what else torch says of them

py::dict stats_dict(const io::TransferStats& stats);
py::dict read_dict(const read::ReadReport& report);
// (row, offset in its file, what is wrong) of each damaged row; rows that are no plain tensors; unverified bytes.
py::tuple check_tuple(const read::ReadReport& report);

// A table of 64-bit integers: array.array("q"), or bytes. Valid while the Python object lives.
class Table {
 public:
  explicit Table(const py::buffer& buffer) : info_(buffer.request()) {
    const bool words = info_.itemsize == 8, bytes = info_.itemsize == 1 && info_.size % 8 == 0;
    if ((!words && !bytes) || info_.ndim != 1 ||
        (info_.size != 0 && (info_.strides[0] != info_.itemsize ||
                             reinterpret_cast<uintptr_t>(info_.ptr) % 8 != 0))) {  // an empty one lies anywhere
      throw py::type_error("a table is a contiguous, aligned one-dimensional buffer of 64-bit integers");
    }
  }
  std::span<const int64_t> values() const {
    return {static_cast<const int64_t*>(info_.ptr), static_cast<size_t>(info_.size * info_.itemsize) / 8};
  }

 private:
  py::buffer_info info_;
};

template <typename Number>
py::bytes bytes_of(const std::vector<Number>& table) {
  return {reinterpret_cast<const char*>(table.data()), table.size() * sizeof(Number)};
}

// Returns what `work` makes.
template <typename Work>
auto without_gil(const Work& work) {
  const py::gil_scoped_release release;
  return work();
}

using Producers = std::vector<std::pair<int, device::StreamHandle>>;  // streams of the trainer, and their devices

inline std::vector<stage::Producer> stage_producers(const Producers& producers) {
  std::vector<stage::Producer> of_devices;
  for (const auto& [device, stream] : producers) of_devices.push_back({device, stream});
  return of_devices;
}

// `read` is given what copies to the devices of the rows, and reports. Returns when all copies are done.
template <typename Read>
py::dict read_to_devices(const Table& devices, const Producers& producers, const Read& read) {
  return read_dict(*without_gil([&] {
    const auto to_devices = stage::device_load(devices.values(), stage_producers(producers));
    auto report = read(to_devices.get());
    if (to_devices) to_devices->finish();
    return report;
  }));
}

// Deletes what takes long to delete. A writer that is given up waits until its upload has ended, and that is a Python
// thread: which needs the GIL.
struct DeleteWithoutGil {
  template <typename Held>
  void operator()(Held* held) const {
    without_gil([&] { delete held; });
  }
};

inline std::span<const std::byte> view(const py::bytes& bytes) {
  const std::string_view text = bytes;
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

inline py::tuple numbers(std::span<const int64_t> values) {
  py::tuple result(values.size());
  for (size_t i = 0; i < values.size(); ++i) result[i] = py::int_(values[i]);
  return result;
}

// An inventory: bytes, or the tuple of its parts. Valid while the Python objects live.
state::InventoryParts inventory_view(const py::handle& inventory);

// Names as pickle has them, with lone surrogates. `named` throws Error (corrupt) for what is no text.
std::string utf8(const py::handle& text);
py::str named(std::string_view bytes);

// Paths and names are bytes to the system; to Python they are text, whatever they hold.
inline py::str text(const std::string& bytes) {
  PyObject* decoded = PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "backslashreplace");
  if (decoded == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::str>(decoded);
}

}  // namespace vescale_ckpt::bindings
