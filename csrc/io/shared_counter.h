// A number in memory that processes share: one process counts up, and others sleep until it has come far enough.
#pragma once

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/error.h"
#include "base/system.h"

namespace vescale_ckpt::io {

class SharedCounter {
 public:
  // In four bytes of the memory, at a multiple of four. The memory must outlive it. Throws Error (invalid).
  SharedCounter(std::span<std::byte> memory, uint64_t offset)
      : word_(reinterpret_cast<uint32_t*>(memory.data() + offset)) {
    if (offset % sizeof *word_ != 0 || memory.size() < sizeof *word_ || offset > memory.size() - sizeof *word_) {
      throw Error::invalid("a counter is not within its memory");
    }
  }

  // What this process has written to the memory before, others see who have seen the value.
  void set(uint32_t value) {
    std::atomic_ref(*word_).store(value, std::memory_order_release);
    system::wake_waiters(word_);
  }
  // Returns the value as soon as it is `least` or more, and else after so many seconds, or when a signal comes.
  uint32_t wait(uint32_t least, double seconds) const {
    using Clock = std::chrono::steady_clock;
    const auto end = Clock::now() + std::chrono::duration<double>(seconds);
    for (;;) {
      const uint32_t now = value();
      const double left = std::chrono::duration<double>(end - Clock::now()).count();
      if (now >= least || left <= 0) return now;
      if (system::wait_for_change(word_, now, left) == -EINTR) return value();
    }
  }

 private:
  uint32_t value() const { return std::atomic_ref(*word_).load(std::memory_order_acquire); }
  uint32_t* word_;
};

}  // namespace vescale_ckpt::io
