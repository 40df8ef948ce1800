// Copies the data of one load to accelerators while it reads more: from page-locked slots, in batches, on its own
// stream for each accelerator.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "io/box_copy.h"
#include "read/reader.h"
#include "stage/device_pipelines.h"
#include "stage/load_streams.h"

namespace vescale_ckpt::stage {

// Thread-safe, except finish().
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

}  // namespace vescale_ckpt::stage
