// Implements the interface of device.h for CUDA.
#pragma once

#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "device/cuda_api.h"
#include "device/cuda_device.h"
#include "device/device.h"

namespace vescale_ckpt::device {

class CudaRuntime final : public DeviceRuntime {
 public:
  // `kernels`: an image of kernels.cu, or nullptr. Starts CUDA: children of a later fork cannot use it. Throws
  // Error(device) with the runtime's text if there is no device.
  CudaRuntime(const cuda::Api& api, const unsigned char* kernels);
  ~CudaRuntime() override;

  // Sets whether copies may be given in batches, on all devices and from now on. A driver or device may refuse batches.
  void enable_batches(bool enabled);
  Accelerator& accelerator(int device) override;

 private:
  const cuda::Api api_;
  const unsigned char* const kernels_;
  cuda::Batches batches_;
  int device_count_ = 0;
  std::mutex mutex_;  // guards the one below
  std::vector<std::unique_ptr<Accelerator>> accelerators_;
};

// Returns this process's runtime, made at the first call; nullptr, with the reason, if there is none.
CudaRuntime* cuda_runtime(std::string& reason);

// Returns the compiled kernels, an image for CUDA's driver; nullptr if the build had no compiler for them.
const unsigned char* kernel_image();

// Whether cuda_runtime was called, with success or not. Saves of states on the host never call it.
bool cuda_was_started();

// What the devices of this process refused, in words, each text once, for its log: copies are then correct, but slower.
// Thread-safe.
void note(const std::string& text);
std::vector<std::string> notes();

}  // namespace vescale_ckpt::device
