// A token bucket: spreads transfers over time so that they stay below so many bytes a second.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>

namespace vescale_ckpt::io {

// Thread-safe.
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

}  // namespace vescale_ckpt::io
