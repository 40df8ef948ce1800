#include "device/page_lock.h"

#include <algorithm>

#include "error.h"

namespace vescale_ckpt::device {

PageLock::PageLock(Accelerator& accelerator, std::span<std::byte> memory, uint64_t piece_bytes)
    : accelerator_(accelerator), memory_(memory), piece_bytes_(piece_bytes) {
  if (piece_bytes == 0) throw Error::invalid("page-locking in pieces of no bytes");
}

void PageLock::lock(const std::atomic<bool>& stop) {
  while (!stop && locked_bytes_ < memory_.size()) {
    const uint64_t at = locked_bytes_;
    const auto piece = memory_.subspan(at, std::min<uint64_t>(piece_bytes_, memory_.size() - at));
    try {
      accelerator_.page_lock(piece);
    } catch (const Error& error) {
      refusal_ = error.what();
      return;
    }
    locked_bytes_ += piece.size();
  }
}

PageLock::~PageLock() {
  for (uint64_t at = 0; at < locked_bytes_; at += piece_bytes_) {
    try {
      accelerator_.page_unlock(memory_.data() + at);
    } catch (const Error&) {  // the runtime is shutting down, and has unlocked everything
    }
  }
}

}  // namespace vescale_ckpt::device
