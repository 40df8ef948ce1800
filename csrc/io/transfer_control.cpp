#include "io/transfer_control.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "base/error.h"

namespace vescale_ckpt::io {

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
