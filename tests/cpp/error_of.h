// The error that a call throws, and the row of a table that it names, for tests.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>

#include "base/error.h"

namespace vescale_ckpt {

inline Error error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "nothing was thrown";
  return Error::invalid("nothing was thrown");
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
