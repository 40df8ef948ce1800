// Copies many rows from one accelerator to the host while others use the accelerator. It has its own streams, runs
// behind the producers' queued work, packs small rows, and has a bounded number of groups in flight.
//
// There is one transfer at a time. One thread calls start and wait.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "device/copy_plan.h"
#include "device/device.h"

namespace vescale_ckpt::device {

class Pipeline {
 public:
  // `accelerator` outlives this. Throws Error(invalid) for invalid limits.
  explicit Pipeline(Accelerator& accelerator, const CopyLimits& limits = {});
  // Drops copies that are not queued yet, and returns when nothing touches the rows any more. That is after the
  // producers have passed the point that the transfer waits for.
  ~Pipeline() = default;
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;

  // Makes the objects that the first start() would make, which takes longer than most copies. Throws Error(device).
  void prepare();

  // Returns at once. A thread copies after the queued work of the producers' streams. Rows, their memory, `cancelled`
  // and the captures of `layout` must live until wait() returns true or throws. Throws Error(device), and then nothing
  // has begun; Error(invalid) if nobody has waited for the last transfer. Once `cancelled` is true, copies that are not
  // queued yet are dropped, and wait() throws.
  void start(std::vector<DeviceRow> rows, std::span<const StreamHandle> producers, const HostLayout& layout = {},
             const std::atomic<bool>* cancelled = nullptr);

  // Returns true when all is copied, false after `timeout`. Throws the first error of the transfer after its end;
  // Error(cancelled) if it was cancelled.
  bool wait(std::chrono::milliseconds timeout);

 private:
  // A group in flight.
  struct Turn {
    std::unique_ptr<Event> staged;  // the kernel has filled the slab
    std::unique_ptr<Event> done;
    std::unique_ptr<Slab> slab;
    bool in_flight = false;
  };

  bool make_slabs();
  void run(const std::stop_token& stop);
  void throw_if_cancelled() const;
  bool wait_for_memory(const CopyGroup& group, const std::stop_token& stop);
  bool wait_for_piece(const std::byte* host, const std::stop_token& stop);
  void queue(CopyGroup& group, Turn& turn);
  void finish(Turn& turn);
  void drain() noexcept;

  Accelerator& accelerator_;
  const CopyLimits limits_;
  // There are two streams, because packing one slab and copying another use different parts of the device.
  const std::unique_ptr<CopyStream> copies_, packs_;
  const std::unique_ptr<Event> produced_;
  std::array<Turn, 3> turns_;  // one is copied, one is packed, and one is spare if this thread is late
  std::optional<CopyPlan> plan_;
  std::optional<uint64_t> usable_piece_;  // the last piece that is known to be usable
  const std::atomic<bool>* cancelled_ = nullptr;

  std::mutex mutex_;  // guards the two below
  std::condition_variable ended_signal_;
  bool ended_ = true;
  std::exception_ptr error_;

  std::jthread thread_;  // declared last: it is stopped and joined before the members that it uses are destroyed
};

}  // namespace vescale_ckpt::device
