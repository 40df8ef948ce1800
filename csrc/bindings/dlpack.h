// The part of DLPack 1 (dmlc.github.io/dlpack) that describes another library's tensors without that library's headers
// and without a copy: a type's attribute `__dlpack_c_exchange_api__` is a capsule with a table of C functions.
#pragma once

#include <cstddef>
#include <cstdint>

namespace vescale_ckpt::bindings::dlpack {

constexpr uint32_t kMajorVersion = 1;
constexpr const char* kApiAttribute = "__dlpack_c_exchange_api__";
constexpr const char* kApiCapsule = "dlpack_exchange_api";

enum TypeCode : uint8_t {
  kInt = 0,
  kUInt = 1,
  kFloat = 2,
  kBfloat = 4,
  kComplex = 5,
  kBool = 6,
  kFloat8_e4m3fn = 10,
  kFloat8_e4m3fnuz = 11,
  kFloat8_e5m2 = 12,
  kFloat8_e5m2fnuz = 13,
  kFloat8_e8m0fnu = 14,
  kFloat4_e2m1fn = 17,
};

struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct Tensor {
  std::byte* data;
  int32_t device_type;
  int32_t device_id;
  int32_t ndim;
  DataType dtype;
  const int64_t* shape;    // null where ndim is 0
  const int64_t* strides;  // elements; null: contiguous
  uint64_t byte_offset;
};
static_assert(sizeof(Tensor) == 48);

struct ExchangeApi {
  uint32_t major;
  uint32_t minor;
  const ExchangeApi* previous;  // an older version of the same, or null
  void* allocate;
  void* managed_from_object;
  void* managed_to_object;
  // Fills `out` with pointers into the object, which must outlive them. -1 with a Python exception set: it cannot.
  int (*borrow)(void* object, Tensor* out);
  void* current_stream;
};
static_assert(sizeof(ExchangeApi) == 56);

}  // namespace vescale_ckpt::bindings::dlpack
