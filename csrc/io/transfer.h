// Moves ranges of bytes between memory and files, with blocking system calls. Concurrency comes from the number of
// threads. Thread-safe on different transfers.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>

#include "base/memory.h"
#include "base/system.h"
#include "base/workers.h"
#include "io/file.h"

namespace vescale_ckpt::io {

struct Transfer {
  Call call = Call::read;  // read or write
  File* file = nullptr;
  uint64_t offset = 0;  // bytes from the start of the file; a multiple of kBlock, as is `data`'s address modulo the
  std::byte* data = nullptr;   // file's memory alignment, wherever file->access() is direct. Null: see `lent`
  uint64_t size = 0;           // bytes asked for
  uint64_t needed = 0;         // bytes that must arrive: a read of whole blocks may pass the end of the file
  bool part_of_block = false;  // others may write to the block: through the page cache, at any offset and size

  // Set by perform().
  std::shared_ptr<const std::byte> lent;  // where a remote read without `data` has its bytes; `data` is there then
  bool reopened = false;                  // the file, after ESTALE
  uint64_t done = 0;
  Access access = Access::buffered;  // how the last part travelled
};

// Returns when the transfer is complete: short calls are continued, interrupted ones repeated, refused direct ones
// repeated the next way. Of a remote file, one request, or a copy into a part that is sent. Throws Error.
void perform(Transfer& transfer);

// Bytes that perform() has read into memory in this process so far.
uint64_t bytes_read();

// Read or write a few bytes at once, through the page cache. Throw Error.
void read_exactly(File& file, uint64_t offset, std::span<std::byte> target);
void write_exactly(File& file, uint64_t offset, std::span<const std::byte> source);

// --- How others slow or end transfers under way: a limit on their rate, and cancellation. Thread-safe.

// A token bucket: spreads transfers over time so that they stay below so many bytes a second.
class RateLimit {
 public:
  using Time = std::chrono::nanoseconds;  // since a moment that never changes
  using Clock = std::function<Time()>;

  static constexpr Time kBurst = std::chrono::milliseconds(100);  // what may be caught up with after a lull

  explicit RateLimit(uint64_t bytes_per_second, Clock clock = steady_now);  // 0: no limit

  // Takes `bytes` out of the bucket, into debt if need be. Returns how long to wait before they are sent.
  Time take(uint64_t bytes);

 private:
  static Time steady_now();

  const double bytes_per_second_;
  const Clock clock_;
  std::mutex mutex_;
  Time paid_ = Time::min();  // when all that was taken so far is paid for
};

class TransferControl {
 public:
  // `path` is for messages; 0 bytes a second: no limit.
  TransferControl(std::string path, uint64_t bytes_per_second);

  void cancel() { cancelled_ = true; }

  // Throws Error(cancelled) after cancel().
  void check() const;
  // Waits until the limit lets `bytes` pass, or `stop` turns true. Throws Error(cancelled) soon after cancel().
  void admit(uint64_t bytes, const std::atomic<bool>& stop);

 private:
  const std::string path_;
  RateLimit limit_;
  std::atomic<bool> cancelled_{false};
};

// --- What a writer and a reader have in common: workers, each with one transfer at a time, whose memory is either a
// slot or the tensor itself.

// Below this a tensor is cheaper to copy into a slot with its neighbours than to send alone.
inline constexpr uint64_t kLargeBody = 2 << 20;
// Unwanted bytes up to this many are cheaper to read from a disk than to skip.
inline constexpr uint64_t kReadGap = 128 << 10;

struct EngineOptions {
  unsigned threads = 4;  // workers
  uint64_t slot_bytes = 8 << 20;
  uint64_t arena_bytes = 256 << 20;
  Access widest = Access::direct;
  bool read_cached = true;        // read files that are in the page cache from there
  uint64_t bytes_per_second = 0;  // most that a writer gives to its file; 0: no limit
  uint64_t read_gap = kReadGap;   // as kReadGap, where files are elsewhere
  int niceness = 0;               // how much lower than the caller's the priority of workers is; 0: it is one of them
};

// A transfer and the memory it needs.
struct Flight {
  Transfer transfer;
  std::optional<Slot> slot;
  const void* item = nullptr;  // for the caller of run_transfers
  uint64_t moved_before = 0;   // bytes that were moved while it was prepared
};

// Counts bytes by the way they took. Thread-safe.
struct TransferStats {
  std::atomic<uint64_t> in_place{0};  // between the file and the tensor's own memory, or a remote file's part
  std::atomic<uint64_t> slots{0};     // through a slot, or memory of a remote store's client
  std::atomic<uint64_t> by_access[2] = {0, 0};

  void count(const Flight& flight, uint64_t bytes) {
    (flight.slot || flight.transfer.lent ? slots : in_place).fetch_add(bytes, std::memory_order_relaxed);
    by_access[static_cast<size_t>(flight.transfer.access)].fetch_add(bytes, std::memory_order_relaxed);
  }
  uint64_t bytes() const { return in_place + slots; }
};

// Runs `queue` empty on options.threads workers. For each item taken:
//   needs_slot(item)      whether it passes through a slot
//   prepare(item, flight) sets up flight.transfer, and flight.item as it likes
//   complete(flight)      called when the transfer is done
// `control`, if there is one, is asked before each transfer. Throws the first Error; `queue` is closed then.
template <typename Item, typename NeedsSlot, typename Prepare, typename Complete>
void run_transfers(WorkQueue<Item>& queue, const EngineOptions& options, const NeedsSlot& needs_slot,
                   const Prepare& prepare, const Complete& complete, TransferControl* control = nullptr) {
  Arena& arena = shared_arena(options.slot_bytes, options.arena_bytes);
  const auto work = [&](const std::atomic<bool>& stop) {
    struct CloseOnError {
      WorkQueue<Item>& queue;
      bool armed = true;
      ~CloseOnError() {
        if (armed) queue.close();  // workers that wait for an item must not wait for this one
      }
    } guard{queue};
    Item next{};
    while (!stop.load(std::memory_order_relaxed) && queue.take(next)) {
      Flight flight;
      if (needs_slot(next)) flight.slot.emplace(arena.acquire());
      prepare(next, flight);
      if (control != nullptr) control->admit(flight.transfer.size + flight.moved_before, stop);
      perform(flight.transfer);
      complete(flight);
    }
    guard.armed = false;
  };
  run_workers(options.threads, work, options.niceness);
}

}  // namespace vescale_ckpt::io
