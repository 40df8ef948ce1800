// What is to be known of torch's tensors: their table (bindings/tensor_reader.h), versions, flags and storages. Torch
// is asked by the methods that Python calls, in one pass, because the memory of many tensors is in no cache.
#include <cstdint>
#include <vector>

#include "base/error.h"
#include "bindings/bindings.h"
#include "bindings/tensor_reader.h"
#include "format/torch_record.h"
#include "state/tables.h"

namespace vescale_ckpt::bindings {
namespace {

py::object call(const py::object& method, const py::handle& self) {
  PyObject* const result = PyObject_CallOneArg(method.ptr(), self.ptr());
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

int64_t number(const py::object& value) {
  const int64_t found = PyLong_AsLongLong(value.ptr());
  if (found == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return found;
}

// Versions and flags of tensors of any type.
class Facts {
 public:
  explicit Facts(size_t tensors) {
    versions_.reserve(tensors);
    requires_grad_.reserve(tensors);
  }
  void add(const py::handle& tensor) {
    versions_.push_back(version_of(tensor));
    requires_grad_.push_back(requires_grad(tensor) ? 1 : 0);
  }
  py::bytes versions() const { return bytes_of(versions_); }
  py::bytes requires_grad() const { return bytes_of(requires_grad_); }

 private:
  // -1 in inference mode, where tensors have no counter.
  int64_t version_of(const py::handle& tensor) const {
    const auto version = py::reinterpret_steal<py::object>(PyObject_GetAttr(tensor.ptr(), version_name_.ptr()));
    if (version) return number(version);
    if (PyErr_ExceptionMatches(PyExc_RuntimeError) == 0) throw py::error_already_set();
    PyErr_Clear();
    return -1;
  }

  bool requires_grad(const py::handle& tensor) const {
    const auto flag = py::reinterpret_steal<py::object>(PyObject_GetAttr(tensor.ptr(), requires_grad_name_.ptr()));
    const int truth = flag ? PyObject_IsTrue(flag.ptr()) : -1;
    if (truth >= 0) return truth == 1;
    if (PyErr_ExceptionMatches(PyExc_Exception) == 0) throw py::error_already_set();
    PyErr_Clear();  // a subclass may do anything
    return false;
  }

  const py::str version_name_{"_version"}, requires_grad_name_{"requires_grad"};
  std::vector<int64_t> versions_;
  std::vector<uint8_t> requires_grad_;
};

// What `state::ready_tensors` asks of tensors that have plain memory, and their storages.
class Storages {
 public:
  explicit Storages(py::function copies_from_cuda) : copies_from_cuda_(std::move(copies_from_cuda)) {}

  void add(const py::handle& tensor, int64_t dtype, int64_t device) {
    const state::LocalTensor row{0, dtype, device, {}, {}};
    if (device != state::kHostDevice && !asked_cuda_ && state::has_memory(row, true)) {
      with_cuda_ = py::cast<bool>(copies_from_cuda_());
      asked_cuda_ = true;
    }
    if (!state::has_memory(row, with_cuda_)) return;
    bool lazy = call(is_neg_, tensor).ptr() == Py_True;
    if (dtype >= 0 && format::dtypes()[static_cast<size_t>(dtype)].name.starts_with("complex")) {
      lazy = lazy || call(is_conj_, tensor).ptr() == Py_True;
    }
    lazy_.push_back(lazy ? std::byte{1} : std::byte{0});
    offsets_.push_back(number(call(storage_offset_, tensor)));
    const py::object storage = call(untyped_storage_, tensor);
    bytes_.push_back(number(call(nbytes_, storage)));
    storages_.append(storage);
  }

  std::vector<uint8_t> ready(std::span<const int64_t> table) const {
    return state::ready_tensors(state::TensorTable(table), with_cuda_, lazy_, offsets_, bytes_);
  }
  py::list storages() const { return storages_; }
  py::bytes bytes() const { return bytes_of(bytes_); }

 private:
  const py::object tensor_ = py::module_::import("torch").attr("Tensor");
  const py::object is_neg_ = tensor_.attr("is_neg"), is_conj_ = tensor_.attr("is_conj");
  const py::object storage_offset_ = tensor_.attr("storage_offset"), untyped_storage_ = tensor_.attr("untyped_storage");
  const py::object nbytes_ = py::module_::import("torch").attr("UntypedStorage").attr("nbytes");
  const py::function copies_from_cuda_;
  bool with_cuda_ = false, asked_cuda_ = false;
  std::vector<std::byte> lazy_;
  std::vector<int64_t> offsets_, bytes_;
  py::list storages_;
};

// (version of each, 64-bit integers; whether each requires a gradient, bytes)
py::tuple tensor_facts(const py::list& tensors) {
  Facts facts(tensors.size());
  for (const py::handle tensor : tensors) facts.add(tensor);
  return py::make_tuple(facts.versions(), facts.requires_grad());
}

// Table; `state::ready_tensors` of it; versions and flags as above; the storages of the tensors that have plain memory;
// and the bytes of each of these.
py::tuple tensor_reads(const py::list& tensors, const py::tuple& plain_types, const py::dict& dtype_codes,
                       const py::function& row_in_python, const py::function& copies_from_cuda,
                       const py::function& is_host_memory) {
  TensorReader reader(plain_types, dtype_codes, row_in_python);
  reader.reserve(tensors.size());
  Facts facts(tensors.size());
  Storages storages(copies_from_cuda);
  std::vector<size_t> without;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const py::handle tensor = PyList_GET_ITEM(tensors.ptr(), static_cast<Py_ssize_t>(i));
    const size_t row = reader.words().size();
    reader.add(tensor);
    const int64_t dtype = reader.words()[row + 1], device = reader.words()[row + 2];
    if (device == -1) without.push_back(i);
    facts.add(tensor);
    storages.add(tensor, dtype, device);
  }
  std::vector<uint8_t> ready = storages.ready(reader.words());
  for (const size_t i : without) {
    ready[i] = py::cast<bool>(is_host_memory(tensors[i])) ? state::kOnHost : state::kNotReady;
  }
  return py::make_tuple(bytes_of(reader.words()), bytes_of(ready), facts.versions(), facts.requires_grad(),
                        storages.storages(), storages.bytes());
}

}  // namespace

void bind_tensor_facts(py::module_& module) {
  module.def("tensor_facts", &tensor_facts, py::arg("tensors"));
  module.def("tensor_reads", &tensor_reads, py::arg("tensors"), py::arg("plain_types"), py::arg("dtype_codes"),
             py::arg("row_in_python"), py::arg("copies_from_cuda"), py::arg("is_host_memory"));
}

}  // namespace vescale_ckpt::bindings
