// What CUDA's streams, events, slabs and accelerators share: the device, made current, and errors in our idiom.
#pragma once

#include <atomic>
#include <string>

#include "base/error.h"
#include "device/cuda_api.h"
#include "device/device.h"

namespace vescale_ckpt::device::cuda {

// What decides for all devices of a runtime whether copies are given in batches.
struct Batches {
  std::atomic<bool> wanted{true};         // by the user
  std::atomic<bool> lock_refused{false};  // copies may be from or to memory that is not locked, as no batch's may
};

struct Device {
  const Api& api;
  Batches& batches_of_all;
  const int index;
  const std::string name;  // "device 0"
  Context context = nullptr;
  void* pack = nullptr;  // the kernel; nullptr until there is a slab
  // Whether copies may be given in batches: the device follows addresses of locked host memory as they are, and no
  // batch was refused so far.
  std::atomic<bool> batches{false};

  bool takes_batches() const { return batches && batches_of_all.wanted && !batches_of_all.lock_refused; }
};

// Whether a device keeps an error, once it has it, and gives it to every call from then on.
inline bool is_sticky(int code) {
  switch (code) {
    case 704:  // of peers and of host memory
    case 705:
    case 708:
    case 711:
    case 712:
    case 713:
      return false;
    default:
      return code == 214 || (code >= 700 && code <= 720);
  }
}

// What CUDA says of an error. Takes the error out of CUDA's own memory of it, where the framework would find it at its
// next check.
inline std::string said(const Api& api, int code) {
  api.get_last_error();
  return "CUDA: " + std::string(api.error_string(code)) + ", " + api.error_name(code);
}

// `operation` is called for its text on failure only.
template <typename Operation>
void check(const Api& api, int code, const Operation& operation) {
  if (code == kSuccess) return;
  const char* whose = is_sticky(code) ? ", perhaps by other work of this process" : "";
  throw Error::device(operation(), said(api, code) + whose, code);
}

// The same of calls that come before the first copy: what the device failed at is not ours.
template <typename Operation>
void check_before_copies(const Device& device, int code, const Operation& operation) {
  if (!is_sticky(code)) return check(device.api, code, operation);
  throw Error::device(device.name + " had failed before, by work of this process", said(device.api, code), code);
}

// A device, current on this thread. Our calls do not end a graph capture that goes on in another thread.
class Current {
 public:
  explicit Current(const Device& device) : api_(device.api) {
    check(api_, api_.context_push(device.context), [&] { return "use " + device.name; });
    api_.exchange_capture_mode(&mode_);
  }
  ~Current() {
    api_.exchange_capture_mode(&mode_);
    Context popped = nullptr;
    api_.context_pop(&popped);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  const Api& api_;
  int mode_ = kCaptureRelaxed;
};

// For destructors: a device that cannot be used any more has given everything back.
template <typename Action>
void on_device_if_usable(const Device& device, const Action& action) noexcept {
  try {
    const Current current(device);
    action();
  } catch (const Error&) {
  }
}

}  // namespace vescale_ckpt::device::cuda
