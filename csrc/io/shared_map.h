// Maps a file into memory that processes share: ranks of a node see there what one of them has read, and counters.
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

class SharedMap {
 public:
  // The descriptor may be closed afterwards. Throws Error (io). Pages are taken when they are first touched: taking all
  // of them here would cost more, because nothing is read meanwhile.
  SharedMap(int descriptor, uint64_t bytes) {
    const int64_t address = system::map_shared(descriptor, bytes);
    if (address < 0) throw Error::system("map shared memory", "", 0, static_cast<int>(-address));
    bytes_ = {reinterpret_cast<std::byte*>(static_cast<uintptr_t>(address)), bytes};
  }
  ~SharedMap() { system::release_addresses(bytes_.data(), bytes_.size()); }
  SharedMap(const SharedMap&) = delete;
  SharedMap& operator=(const SharedMap&) = delete;

  std::span<std::byte> bytes() const { return bytes_; }

 private:
  std::span<std::byte> bytes_;
};

// A number in memory that processes share: one process counts up, and others sleep until it has come far enough.
class SharedCounter {
 public:
  // In four bytes of the map, at a multiple of four. The map must outlive it. Throws Error (invalid).
  SharedCounter(const SharedMap& map, uint64_t offset)
      : word_(reinterpret_cast<uint32_t*>(map.bytes().data() + offset)) {
    if (offset % sizeof *word_ != 0 || offset > map.bytes().size() - sizeof *word_) {
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
