// What a writer and a reader have in common: workers, each with one transfer at a time, whose memory is either a slot
// or the tensor itself.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>

#include "base/memory.h"
#include "base/workers.h"
#include "io/transfer.h"
#include "io/transfer_control.h"

namespace vescale_ckpt::io {

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
  std::atomic<uint64_t> by_access[3] = {0, 0, 0};

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
