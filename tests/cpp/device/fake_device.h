// An accelerator for tests. Its memory is the host's, but its addresses are not, so that whoever follows one crashes.
// Streams are threads, so that copies are late and ThreadSanitizer sees every order that is missing. Any call can fail.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "device/device.h"

namespace vescale_ckpt::device {

enum class Fault {
  make_stream,
  make_event,
  make_slab,
  record_producer,
  after,
  record,
  copy,
  copy_pitched,
  pack,
  wait,
  drain,
  page_lock,
  on_device,  // the next copy that runs, not the call that queues it; everything on that device fails from then on
};
inline constexpr size_t kFaults = 13;

// Work done by one thread, in order.
class FakeQueue {
 public:
  FakeQueue() : thread_([this] { run(); }) {}
  ~FakeQueue();
  void push(std::function<void()> work);
  void drain();
  void hold();  // nothing more runs until release()
  void release();

 private:
  void run();
  std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
  bool running_ = false, held_ = false, closed_ = false;
  std::jthread thread_;
};

class FakeRuntime final : public DeviceRuntime {
 public:
  explicit FakeRuntime(int devices, bool kernels = true);
  ~FakeRuntime() override;

  int device_count() override { return static_cast<int>(devices_.size()); }
  Accelerator& accelerator(int device) override;

  // Device memory, filled with `fill`; given back with the runtime.
  DeviceAddress allocate(int device, uint64_t bytes, std::byte fill = std::byte{0});
  // Allocations of so many bytes, each of which begins where the one before ends.
  std::vector<DeviceAddress> allocate_neighbours(int device, const std::vector<uint64_t>& bytes);
  // The memory behind an address. Throws Error(device) for a range that is not in one allocation of that device.
  std::byte* memory(int device, DeviceAddress address, uint64_t bytes, const std::string& operation);
  std::byte* memory(DeviceAddress address, uint64_t bytes);  // for tests, while nothing runs

  // A framework's stream; handle 0 is the default one of each device.
  StreamHandle make_producer();
  FakeQueue& producer(int device, StreamHandle handle);

  // Lets the call after the next `skip` ones fail, once.
  void fail(Fault fault, uint64_t skip = 0);
  void clear_faults();
  bool fault_happened() const { return happened_; }
  uint64_t calls(Fault fault);
  void maybe_fail(Fault fault, const std::string& operation);

  uint64_t copies_in_flight() const { return copies_in_flight_; }
  uint64_t copies_to_host() const { return copies_to_host_; }  // that ran
  // Copies from and to host memory that was not locked when they were queued.
  uint64_t unlocked_copies() const { return unlocked_copies_; }
  // How often memory was locked or unlocked while a copy used it.
  uint64_t locks_under_copies() const { return locks_under_copies_; }
  uint64_t live_objects() const { return live_objects_; }  // streams, events and slabs

 private:
  friend class FakeAccelerator;
  friend class FakeStream;
  friend class FakeEvent;
  friend class FakeSlab;

  struct Allocation {
    std::shared_ptr<std::vector<std::byte>> memory;  // neighbours share it
    std::span<std::byte> own;
  };

  std::optional<int> device_of(DeviceAddress address) const;  // nullopt: host memory
  void look_for_copies_locked(const std::byte* memory, uint64_t bytes);

  const bool kernels_;
  std::vector<std::unique_ptr<Accelerator>> devices_;
  std::vector<std::unique_ptr<FakeQueue>> defaults_, producers_;
  std::vector<std::atomic<bool>> broken_;
  std::atomic<uint64_t> live_objects_{0}, copies_in_flight_{0}, copies_to_host_{0}, unlocked_copies_{0},
      locks_under_copies_{0};
  std::atomic<bool> happened_{false};

  std::mutex mutex_;  // guards all below
  std::map<DeviceAddress, Allocation> allocations_;
  std::map<const std::byte*, uint64_t> locked_;
  std::multimap<const std::byte*, uint64_t> under_copies_;  // host memory
  std::array<std::optional<uint64_t>, kFaults> faults_;
  std::array<uint64_t, kFaults> calls_{};
};

}  // namespace vescale_ckpt::device
