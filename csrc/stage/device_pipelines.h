// Keeps the pipelines from a runtime's accelerators to the host. Each is made at its first use and kept, because making
// its streams, events and slabs often takes longer than a copy.
#pragma once

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "device/pipeline.h"
#include "stage/snapshot_arena.h"

namespace vescale_ckpt::stage {

// A stream of the trainer. Copies run after the work that is queued in it when they start.
struct Producer {
  int device;
  device::StreamHandle stream;
};

// Lends each pipeline to one borrower at a time. Thread-safe.
class DevicePipelines {
 public:
  // Gives the pipelines back on destruction.
  class Lease {
   public:
    Lease(Lease&& other) noexcept : owner_(other.owner_), devices_(std::move(other.devices_)) {
      other.devices_.clear();
    }
    Lease& operator=(Lease&&) = delete;
    ~Lease() {
      if (!devices_.empty()) owner_.give_back(devices_);  // empty after a move
    }
    device::Pipeline& pipeline(int device) const {
      return owner_.pipeline(device);
    }  // `device` must be one of the borrowed

   private:
    friend class DevicePipelines;
    Lease(DevicePipelines& owner, std::span<const int> devices)
        : owner_(owner), devices_(devices.begin(), devices.end()) {}
    DevicePipelines& owner_;
    std::vector<int> devices_;
  };

  explicit DevicePipelines(device::DeviceRuntime& runtime,
                           const device::CopyLimits& limits = {});  // `runtime` outlives this

  // Borrows the pipelines of all these devices in one step, so that no two borrowers wait for each other. Waits until
  // all are free. Throws Error(device or invalid).
  Lease borrow(std::span<const int> devices);
  // Does the same, but returns nullopt at once if one is not free.
  std::optional<Lease> try_borrow(std::span<const int> devices);
  // Makes the pipelines of these devices with their streams, events and slabs, unless they are in use. Throws
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

// Returns a registrar that locks an arena's memory for all accelerators of the runtime of `accelerator`, which must
// outlive the arena.
MemoryRegistrar page_locking(device::Accelerator& accelerator);

// Returns the memory node that is nearest to all accelerators of these addresses ("0000:3b:00.0"); nullopt if they
// differ, if the system does not know it, and on machines with one node.
std::optional<int> nearest_node(std::span<const std::string> pci_addresses, const std::string& sysfs = "/sys");

// Returns CUDA's pipelines, made at the first call, which also makes the process's arena lock its memory. `devices`:
// the devices that will be used, at least one; if all are nearest to one memory node, the arena takes memory there.
// Throws Error(invalid) with the reason if there is no CUDA.
DevicePipelines& cuda_pipelines(std::span<const int> devices);

}  // namespace vescale_ckpt::stage
