// Reads where torch's tensors are and what they look like, without torch's headers.
#pragma once

#include <algorithm>
#include <array>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/dlpack.h"
#include "format/torch_record.h"

namespace vescale_ckpt::bindings {

struct DTypeName {
  dlpack::DataType type;
  std::string_view name;
};

inline constexpr std::array kDTypeNames = {
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

inline uint32_t key_of(dlpack::DataType type) {
  return uint32_t{type.code} | uint32_t{type.bits} << 8 | uint32_t{type.lanes} << 16;
}

// Makes a table of tensors (state/tables.h), a row a tensor. What DLPack cannot say is asked of Python.
class TensorReader {
 public:
  TensorReader(const py::tuple& plain_types, const py::dict& dtype_codes, py::function row_in_python)
      : dtype_codes_(dtype_codes), row_in_python_(std::move(row_in_python)) {
    for (const DTypeName& known : kDTypeNames) {
      if (const auto code = format::dtype_named(known.name)) codes_.emplace_back(key_of(known.type), *code);
    }
    for (const py::handle type : plain_types) {
      const py::object capsule = py::getattr(type, dlpack::kApiAttribute, py::none());
      if (!PyCapsule_IsValid(capsule.ptr(), dlpack::kApiCapsule)) continue;
      auto* api = static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), dlpack::kApiCapsule));
      while (api != nullptr && api->major != dlpack::kMajorVersion) api = api->previous;
      if (api != nullptr && api->borrow != nullptr) borrowers_.emplace_back(type.ptr(), api->borrow);
    }
  }

  // Makes room for so many tensors of two dimensions.
  void reserve(size_t tensors) { words_.reserve(8 * tensors); }

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
    const std::vector<int64_t> strides = format::contiguous_strides({seen.shape, dims});
    words_.insert(words_.end(), strides.begin(), strides.end());
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

}  // namespace vescale_ckpt::bindings
