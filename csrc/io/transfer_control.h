// How others slow or end transfers under way: a limit on their rate, and cancellation. Thread-safe.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>

namespace vescale_ckpt::io {

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

}  // namespace vescale_ckpt::io
