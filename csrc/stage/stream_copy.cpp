#include "stage/stream_copy.h"

#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace vescale_ckpt::stage {

#if defined(__SSE2__)

// Uses SSE2, which every x86-64 has. Wider registers were not faster, because memory is the limit.
void stream_copy(std::byte* target, const std::byte* source, uint64_t bytes, const std::byte* next) {
  constexpr uint64_t kLine = 64;
  constexpr uint64_t kAhead = 1024;  // the processor's own prefetching ends at each page, and starts late in the next
  constexpr uint64_t kLeast = 512;   // in smaller copies, the ends that are copied as usual are too large a part
  if (bytes < kLeast) {
    if (bytes != 0) std::memcpy(target, source, bytes);
    return;
  }
  const uint64_t head = (kLine - reinterpret_cast<uintptr_t>(target) % kLine) % kLine;
  std::memcpy(target, source, head);
  const uint64_t own = bytes > kAhead ? bytes - kAhead : 0;  // lines before it can prefetch from the source itself
  if (next == nullptr) next = source;
  uint64_t at = head;
  for (; at + kLine <= bytes; at += kLine) {
    __builtin_prefetch(at < own ? source + at + kAhead : next + (at - own));
    __m128i words[4];
    std::memcpy(words, source + at, kLine);
    auto* to = reinterpret_cast<__m128i*>(target + at);
    for (int i = 0; i < 4; ++i) _mm_stream_si128(to + i, words[i]);
  }
  std::memcpy(target + at, source + at, bytes - at);
}

void finish_stream_copies() {
  _mm_sfence();  // without it, such stores may come after the release of a lock
}

#else

void stream_copy(std::byte* target, const std::byte* source, uint64_t bytes, const std::byte*) {
  if (bytes != 0) std::memcpy(target, source, bytes);
}

void finish_stream_copies() {}

#endif

}  // namespace vescale_ckpt::stage
