// Copies the data of loads to accelerators while they read more: from page-locked slots, in batches, each load on its
// own stream for each accelerator. Streams, events and page-locked memory are kept from one load to the next.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <thread>
#include <vector>

#include "base/memory.h"
#include "device/device.h"
#include "io/box.h"
#include "read/reader.h"
#include "stage/device_pipelines.h"

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

// Copies the data of one load. Thread-safe, except finish().
class DeviceLoad final : public read::DeviceSink {
 public:
  // Copies run after the present work of the producers' streams. Each target device needs a producer. `streams`
  // outlives this. Throws Error(device or invalid).
  DeviceLoad(LoadStreams& streams, std::span<const Producer> producers);
  ~DeviceLoad() override;  // returns when nothing touches slots and targets any more
  DeviceLoad(const DeviceLoad&) = delete;
  DeviceLoad& operator=(const DeviceLoad&) = delete;

  void prepare(std::span<std::byte> slot) override;
  std::unique_ptr<Batch> begin() override;

  // Copies boxes from any host memory to their devices, on up to `threads` threads; skips boxes with device -1. The
  // host memory may be freed when this returns. Throws Error(device or invalid) with the index of the copy as item.
  void copy(std::span<const io::BoxCopy> copies, std::span<const int64_t> devices, unsigned threads);

  // Returns when all is copied. Nothing may be added afterwards. Throws the first error of a copy.
  void finish();

 private:
  class Slots;
  using Copies = std::map<int, std::vector<device::FlatCopy>>;  // {device: copies}

  // Copies on a device, and the slot that they read. The slot is given back when no copy reads it any more.
  struct InFlight {
    LoadStream* stream;
    std::unique_ptr<device::Event> done;
    std::shared_ptr<Slot> slot;
  };

  LoadStream& stream_of(int device);
  void send(const Copies& copies, Slot slot);
  void queue(LoadStream& stream, std::span<const device::FlatCopy> copies, std::shared_ptr<Slot> slot);
  void give_slots_back();
  void end() noexcept;

  LoadStreams& streams_;
  std::map<int, std::unique_ptr<LoadStream>> borrowed_;  // {device: stream}

  std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  std::deque<InFlight> in_flight_;
  bool ended_ = false;
  std::exception_ptr error_;

  std::jthread thread_;  // waits for copies, the oldest first
};

// A load by CUDA's streams, if any of the `devices` of a table's rows is not -1; else null. Throws as DeviceLoad.
std::unique_ptr<DeviceLoad> device_load(std::span<const int64_t> devices, std::span<const Producer> producers);

// Copies each box to its device, or within host memory (-1, or without devices), on up to `threads` threads.
void copy_boxes(std::span<const io::BoxCopy> copies, std::span<const int64_t> devices,
                std::span<const Producer> producers, unsigned threads);

}  // namespace vescale_ckpt::stage
