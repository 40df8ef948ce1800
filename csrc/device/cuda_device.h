// Makes a device current, and translates errors, for CUDA's streams, events, slabs and accelerators.
#pragma once

#include <atomic>
#include <string>

#include "base/error.h"
#include "device/cuda_api.h"
#include "device/device.h"

namespace vescale_ckpt::device::cuda {

// Decides for all devices of a runtime whether copies are given in batches.
struct Batches {
  std::atomic<bool> enabled{true};        // whether the user allows batches
  std::atomic<bool> lock_refused{false};  // whether some memory is not locked: a batch may not copy from or to it
};

struct Device {
  const Api& api;
  Batches& batches_of_all;
  const int index;
  const std::string name;  // "device 0"
  Context context = nullptr;
  void *pack = nullptr, *sum_words = nullptr;  // the kernels; nullptr until there is a slab
  // Whether copies may be given in batches: the device uses host addresses of locked memory, and has refused no batch.
  std::atomic<bool> batches{false};

  bool takes_batches() const { return batches && batches_of_all.enabled && !batches_of_all.lock_refused; }
};

// Whether a device returns this error for every later call.
inline bool is_sticky(int code) {
  switch (code) {
    case 704:  // these are errors of peers and of host memory
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

// Returns the runtime's text of an error. Clears the error there, where the framework would find it at its next check.
inline std::string error_text(const Api& api, int code) {
  api.get_last_error();
  return std::string("CUDA: ") + api.error_string(code) + ", " + api.error_name(code);
}

// Throws if `code` is an error. `operation` returns a text, and is called only on failure.
template <typename Operation>
void check(const Api& api, int code, const Operation& operation) {
  if (code == kSuccess) return;
  const char* whose = is_sticky(code) ? ", perhaps by other work of this process" : "";
  throw Error::device(operation(), error_text(api, code) + whose, code);
}

// Does the same for calls before the first copy: an earlier failure of the device comes from other work.
template <typename Operation>
void check_before_copies(const Device& device, int code, const Operation& operation) {
  if (!is_sticky(code)) return check(device.api, code, operation);
  throw Error::device(device.name + " had failed before, by work of this process", error_text(device.api, code), code);
}

// Makes a device current on this thread. Calls do not end a graph capture of another thread.
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

// Runs an action in a destructor. A device that cannot be used any more has freed everything.
template <typename Action>
void on_device_if_usable(const Device& device, const Action& action) noexcept {
  try {
    const Current current(device);
    action();
  } catch (const Error&) {
  }
}

}  // namespace vescale_ckpt::device::cuda
