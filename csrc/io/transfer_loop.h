// What a writer and a reader have in common: workers that keep their channel full of transfers whose memory is either a
// slot or the tensor itself.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <optional>

#include "error.h"
#include "io/channel.h"
#include "io/memory.h"
#include "io/transfer_control.h"
#include "io/workers.h"

namespace vescale_ckpt::io {

struct EngineOptions {
  Backend backend = Backend::automatic;
  unsigned threads = 4;  // workers
  unsigned depth = 4;    // transfers in flight a worker, where the backend can
  uint64_t slot_bytes = 8 << 20;
  uint64_t arena_bytes = 256 << 20;
  Access widest = Access::direct;
  bool read_cached = true;        // read files that are in the page cache from there
  uint64_t bytes_per_second = 0;  // most that a writer gives to its file; 0: no limit
  int niceness = 0;               // how much lower than the caller's the priority of workers is; 0: it is one of them
};

// A transfer and the memory it needs.
struct Flight {
  Transfer transfer;
  std::optional<Slot> slot;
  const void* item = nullptr;  // for the caller of run_transfers
  uint64_t moved_before = 0;   // bytes that were moved while it was prepared
};

// Runs `queue` empty on options.threads workers. For each item taken:
//   needs_slot(item)      whether it passes through a slot
//   prepare(item, flight) sets up flight.transfer but its context, and flight.item as it likes
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
    std::list<Flight> flights;  // before the channel: destroyed after it has waited for what is in flight
    const std::unique_ptr<Channel> channel = make_channel(options.backend, options.depth);
    // One that waits for its turn must have nothing in flight whose end it would not see.
    const size_t depth = control != nullptr && control->limited() ? 1 : channel->depth();
    Item next{};
    bool have_next = false;
    while (!stop.load(std::memory_order_relaxed)) {
      // Waiting for an item or a slot is fine only with nothing in flight: those waited for may be ours.
      const bool idle = flights.empty();
      const bool room = flights.size() < depth;
      if (!have_next && room) have_next = idle ? queue.take(next) : queue.try_take(next);
      if (have_next && room) {
        std::optional<Slot> slot;
        const bool slot_needed = needs_slot(next);
        if (slot_needed) {
          if (idle) {
            slot.emplace(arena.acquire());
          } else {
            slot = arena.try_acquire();
          }
        }
        if (!slot_needed || slot) {
          Flight& flight = flights.emplace_back();
          flight.slot = std::move(slot);
          prepare(next, flight);
          have_next = false;
          if (control != nullptr) control->admit(flight.transfer.size + flight.moved_before, stop);
          flight.transfer.context = &flight;
          channel->submit(&flight.transfer);
          continue;
        }
      }
      if (idle) break;  // nothing in flight and nothing to come
      auto* done = static_cast<Flight*>(channel->wait()->context);
      complete(*done);
      flights.remove_if([done](const Flight& flight) { return &flight == done; });
    }
    guard.armed = false;
  };
  run_workers(options.threads, work, options.niceness);
}

}  // namespace vescale_ckpt::io
