// Maps a file into memory that processes share: ranks of a node see there what one of them has read, and counters.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace vescale_ckpt::io {

class SharedMap {
 public:
  // The descriptor may be closed afterwards. Throws Error (io). Pages are taken when they are first touched: taking all
  // of them here would cost more, because nothing is read meanwhile.
  SharedMap(int descriptor, uint64_t bytes);
  ~SharedMap();
  SharedMap(const SharedMap&) = delete;
  SharedMap& operator=(const SharedMap&) = delete;

  std::span<std::byte> bytes() const { return bytes_; }

 private:
  std::span<std::byte> bytes_;
};

// A number in memory that processes share: one process counts up, and others sleep until it has come far enough.
class SharedCounter {
 public:
  // `word`: four bytes of a SharedMap, at a multiple of four.
  explicit SharedCounter(std::byte* word) : word_(reinterpret_cast<uint32_t*>(word)) {}

  // What this process has written to the memory before, others see who have seen the value.
  void set(uint32_t value);
  uint32_t value() const;
  // Returns the value as soon as it is `least` or more, and else after so many seconds, or when a signal comes.
  uint32_t wait(uint32_t least, double seconds) const;

 private:
  uint32_t* word_;
};

}  // namespace vescale_ckpt::io
