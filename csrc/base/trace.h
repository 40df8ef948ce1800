// Records when threads of the engine began and ended their steps, while a trace is wanted. Thread-safe.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace vescale_ckpt::trace {

enum class Step : uint8_t { checksum, write, limit, sync, read, verify, copy };
const char* name_of(Step step);

struct Span {
  Step step;
  uint32_t lane;  // of threads that run at the same time each has another; numbers of threads that ended come again
  int64_t begin, end;  // nanoseconds of CLOCK_MONOTONIC
  uint64_t bytes;
};

// Most spans that are kept until they are taken; later ones are counted and dropped.
inline constexpr size_t kMostSpans = 1 << 18;

struct Taken {
  std::vector<Span> spans;
  uint64_t dropped = 0;
};

// Of the process. Off at first; then a lap costs one load.
void enable(bool on);
bool enabled();
// What was recorded since the last call.
Taken take();

// Measures one step after another on one thread.
class Laps {
 public:
  Laps() { skip(); }
  // Ends a step that began with the lap before this one. Begins the next.
  void lap(Step step, uint64_t bytes) {
    if (begin_ != 0) record(step, bytes);
  }
  // Begins a step. What lies between the lap before this one and now is not recorded.
  void skip() { begin_ = enabled() ? now() : 0; }

 private:
  static int64_t now();
  void record(Step step, uint64_t bytes);
  int64_t begin_ = 0;  // 0: not recorded
};

}  // namespace vescale_ckpt::trace
