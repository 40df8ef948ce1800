// Copies of many rows from one accelerator to the host, without stopping who uses the accelerator: on streams of
// its own, behind what the producers had queued, packed where rows are small, a bounded number of groups in flight.
//
// One transfer at a time; start and wait belong to one thread.
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
#include "device/row.h"

namespace vescale_ckpt::device {

// What any thread may know of copies under way, and do to them. Several transfers may share one.
struct CopyControl {
  std::atomic<bool> cancelled{false};     // true: what is not queued yet is not copied, and wait() throws
  std::atomic<uint64_t> copied_bytes{0};  // what is copied is added
};

class Pipeline {
 public:
  // `accelerator` outlives this. Throws Error(invalid) for limits that make no sense.
  explicit Pipeline(Accelerator& accelerator, const CopyLimits& limits = {});
  // Abandons what is not queued yet and returns when nothing touches the rows any more: not before the producers passed
  // the point that the transfer waits for.
  ~Pipeline() = default;
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;

  // Makes what the first start() would make, which takes longer than most copies. Throws Error(device).
  void prepare();

  // Returns at once; a thread copies, after what is in the producers' streams now. Rows and their memory must live
  // until wait() returned true or threw, and `control`, and what `layout` calls. What the host's memory is: see
  // HostLayout. Throws Error(device), with nothing begun; Error(invalid) if the last transfer was not waited for.
  void start(std::vector<DeviceRow> rows, std::span<const StreamHandle> producers, const HostLayout& layout = {},
             CopyControl* control = nullptr);

  // True when all is copied, false after `timeout`. Throws the first error of the transfer, once nothing of it runs;
  // Error(cancelled) if that is why not all is copied.
  bool wait(std::chrono::milliseconds timeout);

 private:
  // A group in flight.
  struct Turn {
    std::unique_ptr<Event> staged;  // the kernel has filled the slab
    std::unique_ptr<Event> done;
    std::unique_ptr<Slab> slab;
    uint64_t bytes = 0;
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
  // Two streams, because packing a slab and copying another use different parts of the device.
  const std::unique_ptr<CopyStream> copies_, packs_;
  const std::unique_ptr<Event> produced_;
  std::array<Turn, 3> turns_;  // one is copied, one packed, and one is there for when this thread is late
  std::optional<CopyPlan> plan_;
  std::optional<uint64_t> usable_piece_;  // the last one that was waited for
  CopyControl* control_ = nullptr;

  std::mutex mutex_;  // guards the two below
  std::condition_variable ended_signal_;
  bool ended_ = true;
  std::exception_ptr error_;

  std::jthread thread_;  // last: stopped and joined before what it uses goes
};

}  // namespace vescale_ckpt::device
