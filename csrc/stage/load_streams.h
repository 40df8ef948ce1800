// What loads to accelerators keep from one to the next: streams with their events, and memory that is page-locked.
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

// A stream of copies to one accelerator. One thread at a time may use the stream and take events: who holds `mutex`.
struct LoadStream {
  int device;
  std::mutex mutex;
  std::unique_ptr<device::CopyStream> copies;
  std::vector<std::unique_ptr<device::Event>> events;  // that nobody waits for
};

// Lends each stream to one load at a time. Thread-safe.
class LoadStreams {
 public:
  static constexpr uint64_t kSlotBytes = 4 << 20;

  explicit LoadStreams(device::DeviceRuntime& runtime);  // `runtime` outlives this
  ~LoadStreams();                                        // all memory that it locked is still mapped
  LoadStreams(const LoadStreams&) = delete;
  LoadStreams& operator=(const LoadStreams&) = delete;

  std::unique_ptr<LoadStream> borrow(int device);         // throws Error(device or invalid)
  void give_back(std::unique_ptr<LoadStream> stream);     // nothing is queued on it
  std::unique_ptr<device::Event> make_event(int device);  // throws Error(device)

  // Page-locks memory that stays mapped, for all accelerators and for good; at the first call for it only. Where that
  // is refused, copies from it are slower.
  void lock(int device, std::span<std::byte> memory);
  // Slots that small and strided parts are packed in.
  Arena& slots() { return slots_; }

 private:
  device::DeviceRuntime& runtime_;
  Arena slots_;
  std::mutex mutex_;  // guards all below
  std::multimap<int, std::unique_ptr<LoadStream>> idle_;
  std::set<std::byte*> tried_;        // to lock
  std::map<std::byte*, int> locked_;  // the device by which
};

// CUDA's, made at the first call. Throws Error(invalid) with the reason where there is no CUDA.
LoadStreams& cuda_load_streams();

}  // namespace vescale_ckpt::stage
