// How others slow or end transfers under way: a limit on their rate, and cancellation. Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "io/rate_limit.h"

namespace vescale_ckpt::io {

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
