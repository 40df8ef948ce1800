// The error that a call throws, for tests.
#pragma once

#include <gtest/gtest.h>

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

}  // namespace vescale_ckpt
