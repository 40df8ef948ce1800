// Torch's tensors, without torch's headers, and the tables that say where a state is.
#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "bindings/bindings.h"
#include "bindings/dlpack.h"
#include "format/torch_record.h"
#include "state/inventory.h"
#include "state/replica_hash.h"
#include "state/tables.h"

namespace vescale_ckpt::bindings {
namespace {

// Any contiguous buffer of whole 64-bit words, whatever its items are, valid while this lives.
class Words {
 public:
  explicit Words(const py::handle& object) {
    if (PyObject_GetBuffer(object.ptr(), &buffer_, PyBUF_SIMPLE) != 0) throw py::error_already_set();
    // An empty array.array lies anywhere.
    if (buffer_.len % 8 != 0 || (buffer_.len != 0 && reinterpret_cast<uintptr_t>(buffer_.buf) % 8 != 0)) {
      PyBuffer_Release(&buffer_);
      throw py::type_error("a table is a contiguous buffer of 64-bit integers");
    }
  }
  ~Words() { PyBuffer_Release(&buffer_); }
  Words(const Words&) = delete;
  Words& operator=(const Words&) = delete;

  std::span<const int64_t> values() const {
    return {static_cast<const int64_t*>(buffer_.buf), static_cast<size_t>(buffer_.len) / 8};
  }

 private:
  Py_buffer buffer_{};
};

template <typename T>
py::bytes packed(const std::vector<T>& values) {
  return py::bytes(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

// --- Tensors

struct DTypeName {
  dlpack::DataType type;
  std::string_view name;
};

constexpr std::array kDTypeNames = {
    DTypeName{{dlpack::kFloat, 32, 1}, "float32"},
    DTypeName{{dlpack::kBfloat, 16, 1}, "bfloat16"},
    DTypeName{{dlpack::kFloat, 16, 1}, "float16"},
    DTypeName{{dlpack::kFloat, 64, 1}, "float64"},
    DTypeName{{dlpack::kInt, 64, 1}, "int64"},
    DTypeName{{dlpack::kInt, 32, 1}, "int32"},
    DTypeName{{dlpack::kInt, 16, 1}, "int16"},
    DTypeName{{dlpack::kUInt, 16, 1}, "uint16"},
    DTypeName{{dlpack::kUInt, 32, 1}, "uint32"},
    DTypeName{{dlpack::kUInt, 64, 1}, "uint64"},
    DTypeName{{dlpack::kBool, 8, 1}, "bool"},
    DTypeName{{dlpack::kComplex, 32, 1}, "complex32"},
    DTypeName{{dlpack::kComplex, 64, 1}, "complex64"},
    DTypeName{{dlpack::kComplex, 128, 1}, "complex128"},
    DTypeName{{dlpack::kFloat8_e4m3fn, 8, 1}, "float8_e4m3fn"},
    DTypeName{{dlpack::kFloat8_e4m3fnuz, 8, 1}, "float8_e4m3fnuz"},
    DTypeName{{dlpack::kFloat8_e5m2, 8, 1}, "float8_e5m2"},
    DTypeName{{dlpack::kFloat8_e5m2fnuz, 8, 1}, "float8_e5m2fnuz"},
    DTypeName{{dlpack::kFloat8_e8m0fnu, 8, 1}, "float8_e8m0fnu"},
    DTypeName{{dlpack::kFloat4_e2m1fn, 4, 2}, "float4_e2m1fn_x2"},
    // Not here: int8 and uint8, which torch also says of its integers of 1 to 7 bits.
};

uint32_t key_of(dlpack::DataType type) {
  return uint32_t{type.code} | uint32_t{type.bits} << 8 | uint32_t{type.lanes} << 16;
}

// Appends a row a tensor. What DLPack cannot say is asked of Python.
class TensorReader {
 public:
  TensorReader(const py::tuple& plain_types, const py::dict& dtype_codes, py::function row_in_python)
      : dtype_codes_(dtype_codes), row_in_python_(std::move(row_in_python)) {
    for (const DTypeName& known : kDTypeNames) {
      for (size_t code = 0; code < format::dtypes().size(); ++code) {
        if (format::dtypes()[code].name == known.name)
          codes_.emplace_back(key_of(known.type), static_cast<int64_t>(code));
      }
    }
    for (const py::handle type : plain_types) {
      const py::object capsule = py::getattr(type, dlpack::kApiAttribute, py::none());
      if (!PyCapsule_IsValid(capsule.ptr(), dlpack::kApiCapsule)) continue;
      auto* api = static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), dlpack::kApiCapsule));
      while (api != nullptr && api->major != dlpack::kMajorVersion) api = api->previous;
      if (api != nullptr && api->borrow != nullptr) borrowers_.emplace_back(type.ptr(), api->borrow);
    }
  }

  void add(const py::handle& tensor) {
    dlpack::Tensor seen{};
    const std::optional<int64_t> dtype = borrow(tensor, seen) ? dtype_of(tensor, seen.dtype) : std::nullopt;
    if (!dtype) {
      for (const py::handle word : row_in_python_(tensor)) words_.push_back(word.cast<int64_t>());
      return;
    }
    const auto dims = static_cast<size_t>(seen.ndim);
    words_.push_back(static_cast<int64_t>(reinterpret_cast<uintptr_t>(seen.data) + seen.byte_offset));
    words_.push_back(*dtype);
    words_.push_back(seen.device_type + (static_cast<int64_t>(seen.device_id) << 32));
    words_.push_back(seen.ndim);
    words_.insert(words_.end(), seen.shape, seen.shape + dims);
    if (seen.strides != nullptr) {
      words_.insert(words_.end(), seen.strides, seen.strides + dims);
      return;
    }
    words_.resize(words_.size() + dims);
    int64_t stride = 1;
    for (size_t dim = dims; dim-- > 0; stride *= std::max<int64_t>(seen.shape[dim], 1)) {
      words_[words_.size() - dims + dim] = stride;
    }
  }

  const std::vector<int64_t>& words() const { return words_; }

 private:
  using Borrow = int (*)(void*, dlpack::Tensor*);
  using Kind = std::array<PyObject*, 3>;  // dtype, layout, whether on the meta device: objects that torch never frees

  bool borrow(const py::handle& tensor, dlpack::Tensor& seen) {
    PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(tensor.ptr()));
    const auto found = std::ranges::find(borrowers_, type, &std::pair<PyObject*, Borrow>::first);
    if (found == borrowers_.end()) return false;
    // A refusal costs a millisecond, as torch notes down the whole stack: a kind is asked about once.
    if (!refused_.empty() && std::ranges::find(refused_, kind_of(tensor)) != refused_.end()) return false;
    if (found->second(tensor.ptr(), &seen) == 0) return true;
    PyErr_Clear();
    refused_.push_back(kind_of(tensor));
    return false;
  }

  static Kind kind_of(const py::handle& tensor) {
    return {py::object(tensor.attr("dtype")).ptr(), py::object(tensor.attr("layout")).ptr(),
            py::object(tensor.attr("is_meta")).ptr()};
  }

  std::optional<int64_t> dtype_of(const py::handle& tensor, dlpack::DataType type) {
    const auto found = std::ranges::find(codes_, key_of(type), &std::pair<uint32_t, int64_t>::first);
    if (found != codes_.end()) return found->second;
    const py::object dtype = tensor.attr("dtype");
    PyObject* code = PyDict_GetItemWithError(dtype_codes_.ptr(), dtype.ptr());
    if (code == nullptr) return std::nullopt;
    return py::handle(code).cast<int64_t>();
  }

  std::vector<std::pair<uint32_t, int64_t>> codes_;
  std::vector<std::pair<PyObject*, Borrow>> borrowers_;
  std::vector<Kind> refused_;
  py::dict dtype_codes_;
  py::function row_in_python_;
  std::vector<int64_t> words_;
};

py::bytes tensor_table(const py::list& tensors, const py::tuple& plain_types, const py::dict& dtype_codes,
                       const py::function& row_in_python) {
  TensorReader reader(plain_types, dtype_codes, row_in_python);
  for (const py::handle tensor : tensors) reader.add(tensor);
  return packed(reader.words());
}

std::vector<int64_t> tensor_devices(const py::bytes& table) {
  const Words words(table);
  const state::TensorTable tensors(words.values());
  std::vector<int64_t> devices(tensors.size());
  for (size_t i = 0; i < devices.size(); ++i) devices[i] = tensors[i].device;
  return devices;
}

// --- Items

std::string utf8(const py::handle& name) {
  Py_ssize_t size = 0;
  if (const char* data = PyUnicode_AsUTF8AndSize(name.ptr(), &size); data != nullptr) {
    return {data, static_cast<size_t>(size)};
  }
  if (!PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) throw py::error_already_set();
  PyErr_Clear();  // lone surrogates, which Python's pickle keeps too
  PyObject* encoded = PyUnicode_AsEncodedString(name.ptr(), "utf-8", "surrogatepass");
  if (encoded == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::bytes>(encoded);
}

py::bytes pack_inventory(const py::list& names, const py::buffer& rows, int64_t node) {
  const Words words(rows);
  std::span<const int64_t> rest = words.values();
  state::InventoryBuilder builder;
  for (const py::handle name : names) {
    const uint64_t head = rest.empty() ? 0 : static_cast<uint64_t>(rest[0]);
    const size_t dims = head >> 32;
    if (rest.size() < 2 || rest.size() - 2 < 3 * dims) throw Error::invalid("rows of items end early");
    const std::string text = utf8(name);
    builder.add({text, static_cast<state::ItemKind>(head & 0xFF), static_cast<uint8_t>(head >> 8),
                 static_cast<uint16_t>(head >> 16), static_cast<uint64_t>(rest[1]), rest.subspan(2, dims),
                 rest.subspan(2 + dims, dims), rest.subspan(2 + 2 * dims, dims)});
    rest = rest.subspan(2 + 3 * dims);
  }
  if (!rest.empty()) throw Error::invalid("rows of items without a name");
  const std::vector<std::byte> bytes = builder.pack(node);
  state::Inventory{bytes};  // throws for what no reader would take
  return packed(bytes);
}

// --- Where the items are

py::tuple copy_table(const py::bytes& inventory, const py::buffer& rows, const py::bytes& sources,
                     const py::bytes& tensors, const py::bytes& ready) {
  const Words row_words(rows), source_words(sources), tensor_words(tensors);
  const state::Inventory items(view(inventory));
  const state::CopyTable table =
      state::make_copy_table({items, source_words.values(), tensor_words.values(), view(ready)}, row_words.values());
  return py::make_tuple(packed(table.rows), packed(table.devices));
}

py::tuple read_table(const py::bytes& inventory, const py::buffer& rows, const py::bytes& sources,
                     const py::bytes& tensors, const py::bytes& ready) {
  const Words row_words(rows), source_words(sources), tensor_words(tensors);
  const state::Inventory items(view(inventory));
  const state::FillTable table =
      state::make_read_table({items, source_words.values(), tensor_words.values(), view(ready)}, row_words.values());
  return py::make_tuple(packed(table.copies.rows), packed(table.copies.devices), table.rest);
}

template <auto make>
py::bytes engine_table(const py::bytes& inventory, const py::buffer& rows, const py::bytes& sources,
                       const py::bytes& tensors, const py::bytes& ready) {
  const Words row_words(rows), source_words(sources), tensor_words(tensors);
  const state::Inventory items(view(inventory));
  return packed(make({items, source_words.values(), tensor_words.values(), view(ready)}, row_words.values()));
}

}  // namespace

void bind_tensors(py::module_& module) {
  module.def("tensor_table", &tensor_table, py::arg("tensors"), py::arg("plain_types"), py::arg("dtype_codes"),
             py::arg("row_in_python"));
  module.def("tensor_devices", &tensor_devices, py::arg("table"));
  module.def(
      "same_shapes",
      [](const py::bytes& left, const py::bytes& right) {
        const Words a(left), b(right);
        return state::same_shapes(state::TensorTable(a.values()), state::TensorTable(b.values()));
      },
      "whether two tables of tensors agree in all dtypes and shapes");
  module.def("any_complex",
             [](const py::bytes& table) { return state::any_complex(state::TensorTable(Words(table).values())); });
  module.def(
      "ready_tensors",
      [](const py::bytes& table, bool with_cuda, const py::bytes& lazy, const std::vector<int64_t>& storage_offsets,
         const std::vector<int64_t>& storage_bytes) {
        const Words words(table);
        return packed(state::ready_tensors(state::TensorTable(words.values()), with_cuda, view(lazy), storage_offsets,
                                           storage_bytes));
      },
      py::arg("table"), py::arg("with_cuda"), py::arg("lazy"), py::arg("storage_offsets"), py::arg("storage_bytes"));
  module.def(
      "replica_hashes",
      [](const py::bytes& table, const py::bytes& boxes, uint32_t elements, const py::bytes& factors) {
        const Words words(table), rows(boxes), factor_words(factors);
        const std::span<const int64_t> signed_factors = factor_words.values();
        const std::vector<uint64_t> unsigned_factors(signed_factors.begin(), signed_factors.end());
        return packed(
            state::replica_hashes(state::TensorTable(words.values()), rows.values(), elements, unsigned_factors));
      },
      py::arg("table"), py::arg("boxes"), py::arg("elements"), py::arg("factors"));
  module.def("pack_inventory", &pack_inventory, py::arg("names"), py::arg("rows"), py::arg("node") = 0);
  module.def("write_table", &engine_table<&state::make_write_table>, py::arg("inventory"), py::arg("local_plan"),
             py::arg("sources"), py::arg("tensors"), py::arg("ready"));
  module.def("copy_table", &copy_table, py::arg("inventory"), py::arg("local_plan"), py::arg("sources"),
             py::arg("tensors"), py::arg("ready"), "a write table of rows wherever they are, and their devices");
  module.def("ready_rows", &engine_table<&state::ready_rows>, py::arg("inventory"), py::arg("local_plan"),
             py::arg("sources"), py::arg("tensors"), py::arg("ready"));
  module.def("read_table", &read_table, py::arg("inventory"), py::arg("reads"), py::arg("sources"), py::arg("tensors"),
             py::arg("ready"), "a read table, the device of each row, and the numbers of rows that are not in it");
}

}  // namespace vescale_ckpt::bindings
