#include "bindings/torch_calls.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "base/error.h"
#include "bindings/tensor_reader.h"
#include "state/tables.h"

namespace vescale_ckpt::bindings {
namespace {

template <typename Function>
void find(const std::string& library, const std::string& name, Function*& function) {
  void* const loaded = ::dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);  // torch keeps it loaded
  if (loaded != nullptr) function = reinterpret_cast<Function*>(::dlsym(loaded, name.c_str()));
  if (function == nullptr) throw Error::invalid("this torch has no function " + name);
}

// What torch says of a value of any type, by Python.
TorchCalls::Facts facts_in_python(const py::handle& tensor) {
  TorchCalls::Facts facts;
  try {
    facts.requires_grad = py::cast<bool>(tensor.attr("requires_grad"));
  } catch (py::error_already_set&) {  // a subclass may do anything
  }
  try {
    facts.version = py::cast<int64_t>(tensor.attr("_version"));
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_RuntimeError)) throw;
  }
  return facts;
}

// Visits values in order. Tensors lie all over memory: what will be read of the next ones is fetched meanwhile.
class Visits {
 public:
  Visits(const TorchCalls& calls, const py::list& values, const py::tuple& torch_types)
      : calls_(calls), values_(values.ptr()), size_(PyList_GET_SIZE(values.ptr())) {
    for (const py::handle type : torch_types) types_.push_back(type.ptr());
  }

  // Calls `visit(value, tensor)`; the tensor is null for a value of another type than `torch_types`.
  template <typename Visit>
  void each(const Visit& visit) const {
    std::array<TorchCalls::Tensor, kAhead> ahead;
    for (Py_ssize_t first = 0; first < size_; first += kAhead) {
      const Py_ssize_t count = std::min(size_ - first, kAhead);
      for (Py_ssize_t i = 0; i < count; ++i) {
        const py::handle value = PyList_GET_ITEM(values_, first + i);
        const bool known = std::ranges::find(types_, reinterpret_cast<PyObject*>(Py_TYPE(value.ptr()))) != types_.end();
        ahead[static_cast<size_t>(i)] = known ? calls_.tensor(value) : TorchCalls::Tensor();
        if (known) ahead[static_cast<size_t>(i)].prefetch();
      }
      for (Py_ssize_t i = 0; i < count; ++i) {
        if (first + i + kAhead < size_) __builtin_prefetch(PyList_GET_ITEM(values_, first + i + kAhead));
        visit(py::handle(PyList_GET_ITEM(values_, first + i)), ahead[static_cast<size_t>(i)]);
      }
    }
  }

 private:
  static constexpr Py_ssize_t kAhead = 16;

  const TorchCalls& calls_;
  PyObject* values_;
  Py_ssize_t size_;
  std::vector<PyObject*> types_;
};

// Versions and flags of many values.
class FactsOfAll {
 public:
  FactsOfAll(const TorchCalls& calls, size_t size) : calls_(calls) {
    versions_.reserve(size);
    requires_grad_.reserve(size);
  }
  void add(const py::handle& value, const TorchCalls::Tensor& tensor) {
    const auto facts = tensor.implementation() == nullptr ? facts_in_python(value) : calls_.facts(tensor);
    versions_.push_back(facts.version);
    requires_grad_.push_back(facts.requires_grad ? 1 : 0);
  }
  py::bytes versions() const { return bytes_of(versions_); }
  py::bytes requires_grad() const { return bytes_of(requires_grad_); }

 private:
  const TorchCalls& calls_;
  std::vector<int64_t> versions_;
  std::vector<uint8_t> requires_grad_;
};

// (version of each, 64-bit integers; whether each requires a gradient, bytes)
py::tuple tensor_facts(const TorchCalls& calls, const py::list& values, const py::tuple& torch_types) {
  FactsOfAll facts(calls, values.size());
  Visits(calls, values, torch_types).each([&](const py::handle& value, const TorchCalls::Tensor& tensor) {
    facts.add(value, tensor);
  });
  return py::make_tuple(facts.versions(), facts.requires_grad());
}

// What is to be known of tensors' memory for `state::ready_tensors`, and the storages.
class Memory {
 public:
  Memory(const TorchCalls& calls, py::object untyped_storage, py::function copies_from_cuda)
      : calls_(calls), untyped_storage_(std::move(untyped_storage)), copies_from_cuda_(std::move(copies_from_cuda)) {}

  void add(const py::handle& value, const TorchCalls::Tensor& tensor, int64_t dtype, int64_t device) {
    if (!with_cuda_ && (device & UINT32_MAX) == state::kCudaDevice && device >= 0 && !asked_) {
      with_cuda_ = py::cast<bool>(copies_from_cuda_());
      asked_ = true;
    }
    if (!state::has_memory({0, dtype, device, {}, {}}, with_cuda_)) return;
    // DLPack knows tensors of torch's own types only.
    const TorchCalls::StorageFacts facts = calls_.storage(tensor);
    bool lazy = facts.is_neg;
    if (dtype >= 0 && format::dtypes()[static_cast<size_t>(dtype)].name.starts_with("complex")) {
      lazy = lazy || py::cast<bool>(value.attr("is_conj")());
    }
    lazy_.push_back(lazy ? std::byte{1} : std::byte{0});
    offsets_.push_back(facts.offset);
    bytes_.push_back(facts.bytes);
    PyObject* storage = PyObject_CallOneArg(untyped_storage_.ptr(), value.ptr());
    if (storage == nullptr) throw py::error_already_set();
    storages_.append(py::reinterpret_steal<py::object>(storage));
  }

  py::bytes ready(std::span<const int64_t> table) const {
    return bytes_of(state::ready_tensors(state::TensorTable(table), with_cuda_, lazy_, offsets_, bytes_));
  }
  py::list storages() const { return storages_; }
  py::bytes bytes() const { return bytes_of(bytes_); }

 private:
  const TorchCalls& calls_;
  py::object untyped_storage_;
  py::function copies_from_cuda_;
  bool with_cuda_ = false, asked_ = false;
  std::vector<std::byte> lazy_;
  std::vector<int64_t> offsets_, bytes_;
  py::list storages_;
};

// All that is to be known of tensors: their table; version and requires_grad of each, as above; `state::ready_tensors`;
// storage and bytes of each that has plain memory; and whether one has none.
py::tuple read_tensors(const TorchCalls& calls, const py::list& tensors, const py::tuple& plain_types,
                       const py::dict& dtype_codes, const py::function& row_in_python,
                       const py::object& untyped_storage, const py::function& copies_from_cuda) {
  TensorReader reader(plain_types, dtype_codes, row_in_python);
  reader.reserve(tensors.size());
  FactsOfAll facts(calls, tensors.size());
  Memory memory(calls, untyped_storage, copies_from_cuda);
  bool any_without = false;
  Visits(calls, tensors, plain_types).each([&](const py::handle& value, const TorchCalls::Tensor& tensor) {
    const size_t row = reader.words().size();
    reader.add(value);
    const int64_t dtype = reader.words()[row + 1], device = reader.words()[row + 2];
    any_without = any_without || device == -1;
    facts.add(value, tensor);
    if (tensor.implementation() != nullptr) memory.add(value, tensor, dtype, device);
  });
  return py::make_tuple(bytes_of(reader.words()), facts.versions(), facts.requires_grad(), memory.ready(reader.words()),
                        memory.storages(), memory.bytes(), any_without);
}

}  // namespace

TorchCalls::TorchCalls(const TorchNames& names) {
  find(names.library, names.version, version_);
  find(names.core_library, names.requires_grad, requires_grad_);
  find(names.library, names.is_neg, is_neg_);
  find(names.library, names.storage_offset, storage_offset_);
  find(names.library, names.storage_bytes, storage_bytes_);
  const py::object base = py::module_::import("torch._C").attr("TensorBase");
  cdata_ = base.attr("__dict__")["_cdata"];
  if (!Py_IS_TYPE(cdata_.ptr(), &PyGetSetDescr_Type)) throw Error::invalid("this torch has no _cdata");
  const PyGetSetDef* definition = reinterpret_cast<PyGetSetDescrObject*>(cdata_.ptr())->d_getset;
  get_ = definition->get;
  closure_ = definition->closure;
}

void TorchCalls::Tensor::prefetch() const {
  const char* const at = static_cast<const char*>(found_);
  for (size_t line = 0; line < 4; ++line) __builtin_prefetch(at + 64 * line);
}

TorchCalls::Tensor TorchCalls::tensor(const py::handle& tensor) const {
  const auto number = py::reinterpret_steal<py::object>(get_(tensor.ptr(), closure_));
  const void* found = number ? PyLong_AsVoidPtr(number.ptr()) : nullptr;
  if (found == nullptr) {
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    throw Error::invalid("a tensor without an implementation");
  }
  return Tensor(found);
}

TorchCalls::Facts TorchCalls::facts(const Tensor& tensor) const {
  Facts facts;
  facts.requires_grad = requires_grad_(tensor.implementation());
  try {
    facts.version = version_(tensor.handle());
  } catch (const std::exception&) {  // a tensor of inference mode
    facts.version = -1;
  }
  return facts;
}

TorchCalls::StorageFacts TorchCalls::storage(const Tensor& tensor) const {
  StorageFacts facts;
  facts.is_neg = is_neg_(tensor.handle());
  if (storage_offset_(tensor.handle(), &facts.offset) != 0 || storage_bytes_(tensor.handle(), &facts.bytes) != 0) {
    throw Error::invalid("a tensor without a storage");
  }
  return facts;
}

void bind_torch_calls(py::module_& module) {
  py::class_<TorchCalls>(module, "TorchCalls")
      .def(py::init([](const std::string& library, const std::string& core_library, const std::string& version,
                       const std::string& requires_grad, const std::string& is_neg, const std::string& storage_offset,
                       const std::string& storage_bytes) {
             return TorchCalls({library, core_library, version, requires_grad, is_neg, storage_offset, storage_bytes});
           }),
           py::kw_only(), py::arg("library"), py::arg("core_library"), py::arg("version"), py::arg("requires_grad"),
           py::arg("is_neg"), py::arg("storage_offset"), py::arg("storage_bytes"))
      .def(
          "storage",
          [](const TorchCalls& calls, const py::object& tensor) {
            const TorchCalls::StorageFacts facts = calls.storage(calls.tensor(tensor));
            return py::make_tuple(facts.is_neg, facts.offset, facts.bytes);
          },
          "(is_neg, storage_offset, bytes of the storage) of a tensor with plain memory")
      .def("facts", &tensor_facts, py::arg("tensors"), py::arg("torch_types"))
      .def("read", &read_tensors, py::arg("tensors"), py::arg("plain_types"), py::arg("dtype_codes"),
           py::arg("row_in_python"), py::arg("untyped_storage"), py::arg("copies_from_cuda"));
}

}  // namespace vescale_ckpt::bindings
