// Host memory that is page-locked for as long as this lives, in pieces registered one by one: locking holds a lock of
// the driver, and some systems refuse large ranges.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "device/device.h"

namespace vescale_ckpt::device {

class PageLock {
 public:
  // Locks nothing yet. `accelerator` outlives this; `memory` too.
  PageLock(Accelerator& accelerator, std::span<std::byte> memory, uint64_t piece_bytes);
  ~PageLock();
  PageLock(const PageLock&) = delete;
  PageLock& operator=(const PageLock&) = delete;

  // Locks from the start until all is locked, `stop` turns true, or the system refuses: the rest stays as it is, which
  // is slow but not wrong. Call it once, from any thread.
  void lock(const std::atomic<bool>& stop);

  uint64_t locked_bytes() const { return locked_bytes_.load(); }
  const std::string& refusal() const { return refusal_; }  // after lock(): why not all is locked; empty if it is

 private:
  Accelerator& accelerator_;
  const std::span<std::byte> memory_;
  const uint64_t piece_bytes_;
  std::atomic<uint64_t> locked_bytes_{0};
  std::string refusal_;
};

}  // namespace vescale_ckpt::device
