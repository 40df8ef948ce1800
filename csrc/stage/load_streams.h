// Keeps streams, events and page-locked memory from one load to accelerators to the next.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <vector>

#include "base/memory.h"
#include "device/device.h"

namespace vescale_ckpt::stage {

// A stream of copies to one accelerator. Only the holder of `mutex` may use the stream and take events.
struct LoadStream {
  int device;
  std::mutex mutex;
  std::unique_ptr<device::CopyStream> copies;
  std::vector<std::unique_ptr<device::Event>> events;  // events that nobody waits for
};

// Lends each stream to one load at a time. Thread-safe.
class LoadStreams {
 public:
  static constexpr uint64_t kSlotBytes = 4 << 20;

  explicit LoadStreams(device::DeviceRuntime& runtime);  // `runtime` outlives this
  ~LoadStreams();                                        // all memory that it locked must still be mapped
  LoadStreams(const LoadStreams&) = delete;
  LoadStreams& operator=(const LoadStreams&) = delete;

  std::unique_ptr<LoadStream> borrow(int device);         // throws Error(device or invalid)
  void give_back(std::unique_ptr<LoadStream> stream);     // its queue must be empty
  std::unique_ptr<device::Event> make_event(int device);  // throws Error(device)

  // Page-locks memory that stays mapped, for all accelerators and for ever, at the first call for it. If the device
  // refuses, copies from the memory are slower.
  void lock(int device, std::span<std::byte> memory);
  // Returns slots in which small and strided parts are packed.
  Arena& slots() { return slots_; }

 private:
  device::DeviceRuntime& runtime_;
  Arena slots_;
  std::mutex mutex_;  // guards all below
  std::multimap<int, std::unique_ptr<LoadStream>> idle_;
  std::set<std::byte*> tried_;        // memory that was tried to lock
  std::map<std::byte*, int> locked_;  // the device that locked the memory
};

// Returns CUDA's streams, made at the first call. Throws Error(invalid) with the reason if there is no CUDA.
LoadStreams& cuda_load_streams();

}  // namespace vescale_ckpt::stage
