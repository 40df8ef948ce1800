#include "io/shared_counter.h"

#include <atomic>
#include <cerrno>
#include <chrono>

#include "base/system.h"

namespace vescale_ckpt::io {

void SharedCounter::set(uint32_t value) {
  std::atomic_ref(*word_).store(value, std::memory_order_release);
  system::wake_waiters(word_);
}

uint32_t SharedCounter::value() const {
  return std::atomic_ref(*word_).load(std::memory_order_acquire);
}

uint32_t SharedCounter::wait(uint32_t least, double seconds) const {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  for (;;) {
    const uint32_t now = value();
    const double left = std::chrono::duration<double>(end - Clock::now()).count();
    if (now >= least || left <= 0) return now;
    if (system::wait_for_change(word_, now, left) == -EINTR) return value();
  }
}

}  // namespace vescale_ckpt::io
