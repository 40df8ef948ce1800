// Counts bytes by the way they took. Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>

#include "io/transfer_loop.h"

namespace vescale_ckpt::io {

struct TransferStats {
  std::atomic<uint64_t> in_place{0};  // between the tensor's own memory and the file
  std::atomic<uint64_t> slots{0};     // through a slot, or memory of a remote store's client
  std::atomic<uint64_t> by_access[3] = {0, 0, 0};

  void count(const Flight& flight, uint64_t bytes) {
    (flight.slot || flight.transfer.lent ? slots : in_place).fetch_add(bytes, std::memory_order_relaxed);
    by_access[static_cast<size_t>(flight.transfer.access)].fetch_add(bytes, std::memory_order_relaxed);
  }
  uint64_t bytes() const { return in_place + slots; }
};

}  // namespace vescale_ckpt::io
