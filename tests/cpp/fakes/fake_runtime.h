// An accelerator for tests: the engine's CUDA runtime over the fake one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "device/cuda.h"
#include "fakes/fake_queue.h"

namespace vescale_ckpt::device {

class FakeRuntime final : public DeviceRuntime {
 public:
  explicit FakeRuntime(bool kernels = true);
  ~FakeRuntime() override;

  Accelerator& accelerator(int device) override { return cuda_->accelerator(device); }

  // Device memory, filled with `fill`; given back with the runtime.
  DeviceAddress allocate(int device, uint64_t bytes, std::byte fill = std::byte{0});
  std::byte* memory(DeviceAddress address) const;  // for tests, while nothing runs

  // A framework's stream; handle 0 is the default one of each device.
  StreamHandle make_producer();
  FakeQueue& producer(int device, StreamHandle handle);

  // Lets the call after the next `skip` ones fail, once. "on the device": the next copy that runs, not the call that
  // queues it; everything fails from then on.
  void fail(const std::string& call, uint64_t skip = 0, int code = 7);
  bool fault_happened() const { return count("faults") != faults_; }  // since the last fail()
  void heal();

  // Of calls, by their name, and: "objects" (streams, events and slabs that live), "copies in flight", "copies to host"
  // (that ran), "copies of memory that is not locked" (when they were queued), "locks under copies" (of their memory).
  uint64_t count(const std::string& name) const;

 private:
  const std::unique_ptr<CudaRuntime> cuda_;
  std::vector<DeviceAddress> allocations_;
  std::vector<std::unique_ptr<std::byte[]>> memory_;
  std::vector<std::unique_ptr<FakeQueue>> producers_;
  uint64_t faults_ = 0;
};

}  // namespace vescale_ckpt::device
