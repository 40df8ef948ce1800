// A number in memory that processes share: one process counts up, and others sleep until it has come far enough.
#pragma once

#include <cstddef>
#include <cstdint>

namespace vescale_ckpt::io {

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
