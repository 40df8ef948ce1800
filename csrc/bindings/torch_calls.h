// Functions of torch's own libraries that tell what a tensor is, found by name at run time: without torch's headers,
// and without Python's cost of a call. A tensor of torch's C++ is one pointer, to what `Tensor._cdata` gives the
// address of.
#pragma once

#include <cstdint>
#include <string>

#include "bindings/bindings.h"

namespace vescale_ckpt::bindings {

// Where the functions are, and their names there.
struct TorchNames {
  std::string library;        // path of libtorch_cpu
  std::string core_library;   // path of libc10
  std::string version;        // int64_t at::TensorBase::_version() const
  std::string requires_grad;  // bool c10::TensorImpl::requires_grad() const, of the core library
  std::string is_neg;         // bool is_neg(const at::Tensor&)
  std::string storage_offset,
      storage_bytes;  // int (at::Tensor*, int64_t*): torch's stable C interface; elements, bytes
};

class TorchCalls {
 public:
  // Throws Error (invalid) if one of the functions is missing.
  explicit TorchCalls(const TorchNames& names);

  // A tensor in torch's C++, valid while the Python object lives.
  class Tensor {
   public:
    explicit Tensor(const void* found = nullptr) : found_(found) {}
    const void* implementation() const { return found_; }
    const void* handle() const { return &found_; }
    void prefetch() const;

   private:
    const void* found_;
  };
  // Of a value of exactly one of torch's own types.
  Tensor tensor(const py::handle& tensor) const;

  struct Facts {
    int64_t version = -1;  // -1 in inference mode, where tensors have no counter
    bool requires_grad = false;
  };
  Facts facts(const Tensor& tensor) const;

  struct StorageFacts {
    bool is_neg = false;
    int64_t offset = 0;  // elements
    int64_t bytes = 0;
  };
  // Of a tensor that has plain memory.
  StorageFacts storage(const Tensor& tensor) const;

 private:
  int64_t (*version_)(const void*) = nullptr;
  bool (*requires_grad_)(const void*) = nullptr;
  bool (*is_neg_)(const void*) = nullptr;
  int (*storage_offset_)(const void*, int64_t*) = nullptr;
  int (*storage_bytes_)(const void*, int64_t*) = nullptr;
  py::object cdata_;  // keeps the descriptor
  getter get_ = nullptr;
  void* closure_ = nullptr;
};

}  // namespace vescale_ckpt::bindings
