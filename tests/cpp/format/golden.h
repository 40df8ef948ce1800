// Records as torch.save writes them; data/make_golden.py made them.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "format/torch_record.h"
#include "scratch.h"
#include "tensors.h"

namespace vescale_ckpt::format {

inline std::string golden(std::string_view name) {
  std::string bytes = read_file(std::string(VESCALE_CKPT_TEST_DATA) + "/" + std::string(name) + ".bin");
  EXPECT_FALSE(bytes.empty()) << "no golden record " << name;
  return bytes;
}

inline std::span<const std::byte> view(std::string_view bytes) {
  return {reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()};
}

struct GoldenTensor {
  const char* name;
  const char* dtype;
  Sizes sizes;

  TensorRecord record() const { return TensorRecord(dtypes()[dtype_code(dtype)], sizes); }
};

inline const std::vector<GoldenTensor>& golden_tensors() {
  static const std::vector<GoldenTensor> tensors = {
      {"float32_2x3", "float32", {2, 3}},
      {"bfloat16_5", "bfloat16", {5}},
      {"bool_scalar", "bool", {}},
      {"int64_0x4", "int64", {0, 4}},
      {"int8_2x1x300x2", "int8", {2, 1, 300, 2}},
      {"float8_e4m3fn_7", "float8_e4m3fn", {7}},
      {"uint16_3x3", "uint16", {3, 3}},
      {"complex128_2", "complex128", {2}},
  };
  return tensors;
}

}  // namespace vescale_ckpt::format
