#include "io/rate_limit.h"

#include <algorithm>
#include <utility>

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

}  // namespace vescale_ckpt::io
