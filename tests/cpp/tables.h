// Words of tables that cross from Python, for tests, and the row that an error names.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string_view>

#include "base/error.h"
#include "tensors.h"

namespace vescale_ckpt {

inline int64_t code_of(std::string_view dtype) {
  return static_cast<int64_t>(dtype_code(dtype));
}

inline int64_t address(const std::byte* data) {
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(data));
}

inline int64_t address(const Memory& memory) {
  return address(memory.data());
}

// The row that the Error of `action` names, which is to be of that kind; -2 if it throws none.
template <typename Action>
int64_t row_of_error(const Action& action, Error::Kind kind = Error::Kind::invalid) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind, kind) << error.what();
    return error.item;
  }
  return -2;
}

}  // namespace vescale_ckpt
