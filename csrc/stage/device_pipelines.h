// The pipelines from a runtime's accelerators to the host. Each is made when it is first needed, and kept, because its
// streams, events and slabs often take longer to make than a copy takes.
#pragma once

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "device/pipeline.h"
#include "stage/snapshot_arena.h"

namespace vescale_ckpt::stage {

// Lends each pipeline to one borrower at a time. Thread-safe.
class DevicePipelines {
 public:
  // Gives them back on destruction.
  class Lease {
   public:
    Lease(Lease&& other) noexcept : owner_(other.owner_), devices_(std::move(other.devices_)) {
      other.devices_.clear();
    }
    Lease& operator=(Lease&&) = delete;
    ~Lease() {
      if (!devices_.empty()) owner_.give_back(devices_);  // one that was moved from has none
    }
    device::Pipeline& pipeline(int device) const { return owner_.pipeline(device); }  // one of those that were borrowed

   private:
    friend class DevicePipelines;
    Lease(DevicePipelines& owner, std::span<const int> devices)
        : owner_(owner), devices_(devices.begin(), devices.end()) {}
    DevicePipelines& owner_;
    std::vector<int> devices_;
  };

  explicit DevicePipelines(device::DeviceRuntime& runtime,
                           const device::CopyLimits& limits = {});  // `runtime` outlives this

  // The pipelines of all these devices together, so that no two can wait for what the other has. Waits until they are
  // free. Throws Error(device or invalid).
  Lease borrow(std::span<const int> devices);
  // The same, but nullopt at once where one is not free.
  std::optional<Lease> try_borrow(std::span<const int> devices);
  // Makes the pipelines of these devices with all that they keep, unless they are in use, as made ones are. Throws
  // Error(device or invalid).
  void prepare(std::span<const int> devices);

 private:
  bool free_locked(std::span<const int> devices) const;
  Lease take_locked(std::span<const int> devices);
  void give_back(std::span<const int> devices);
  device::Pipeline& pipeline(int device);

  device::DeviceRuntime& runtime_;
  const device::CopyLimits limits_;
  std::mutex mutex_;  // guards all below
  std::condition_variable given_back_;
  std::map<int, std::unique_ptr<device::Pipeline>> pipelines_;
  std::set<int> lent_;
};

// Lets an arena lock its memory for all accelerators of the runtime that `accelerator` is of, which outlives the arena.
MemoryRegistrar page_locking(device::Accelerator& accelerator);

// CUDA's, made at the first call, which also lets the process's arena lock its memory. `devices`: those that will be
// used, at least one; while all of a process are next to one node of memory, its arena takes memory there. Tensors of
// up to `pack_bytes`, as the first call has them, are packed. Throws Error(invalid) with the reason where there is no
// CUDA.
DevicePipelines& cuda_pipelines(std::span<const int> devices, uint64_t pack_bytes);

}  // namespace vescale_ckpt::stage
