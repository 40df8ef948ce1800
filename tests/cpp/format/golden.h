// Records as torch.save writes them; data/make_golden.py made them.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "scratch.h"

namespace vescale_ckpt::format {

inline std::string golden(std::string_view name) {
  std::string bytes = read_file(std::string(VESCALE_CKPT_TEST_DATA) + "/" + std::string(name) + ".bin");
  EXPECT_FALSE(bytes.empty()) << "no golden record " << name;
  return bytes;
}

inline std::span<const std::byte> view(std::string_view bytes) {
  return {reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()};
}

}  // namespace vescale_ckpt::format
