#include "io/transfer_control.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "base/error.h"

namespace vescale_ckpt::io {

RateLimit::RateLimit(uint64_t bytes_per_second, Clock clock)
    : bytes_per_second_(static_cast<double>(bytes_per_second)), clock_(std::move(clock)) {}

RateLimit::Time RateLimit::take(uint64_t bytes) {
  if (bytes_per_second_ == 0) return Time::zero();
  // A year, past which a clock of nanoseconds would overflow before long.
  constexpr double kMostSeconds = 365.0 * 24 * 3600;
  const std::chrono::duration<double> cost(std::min(kMostSeconds, static_cast<double>(bytes) / bytes_per_second_));
  const std::lock_guard lock(mutex_);
  const Time now = clock_();
  paid_ = std::max(paid_, now - kBurst);
  const Time wait = std::max(Time::zero(), paid_ - now);
  paid_ += std::chrono::duration_cast<Time>(cost);
  return wait;
}

RateLimit::Time RateLimit::steady_now() {
  return std::chrono::steady_clock::now().time_since_epoch();
}

TransferControl::TransferControl(std::string path, uint64_t bytes_per_second)
    : path_(std::move(path)), limit_(bytes_per_second) {}

void TransferControl::check() const {
  if (cancelled_.load(std::memory_order_relaxed)) {
    throw Error(Error::Kind::cancelled, "writing " + path_ + " was cancelled", path_);
  }
}

void TransferControl::admit(uint64_t bytes, const std::atomic<bool>& stop) {
  constexpr std::chrono::milliseconds kLookUp{20};  // how soon one that waits notices that it is to end
  check();
  for (RateLimit::Time left = limit_.take(bytes); left > RateLimit::Time::zero() && !stop; left -= kLookUp) {
    std::this_thread::sleep_for(std::min<RateLimit::Time>(left, kLookUp));
    check();
  }
}

}  // namespace vescale_ckpt::io
