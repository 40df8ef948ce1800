// Sums of words times powers of the point, by the fastest instructions of this processor.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/field.h"

namespace vescale_ckpt::fingerprint {

using field::Value;

constexpr uint64_t kWordBytes = 6;
// The point: the first 127 bits of the fractional part of pi.
constexpr Value kPoint = ((Value{0x243F6A8885A308D3} << 64) | 0x13198A2E03707344) >> 1;

constexpr uint64_t kBlockWords = 1024;

constexpr std::array<Value, kBlockWords> make_powers() {
  std::array<Value, kBlockWords> powers{1};
  for (size_t i = 1; i < kBlockWords; ++i) powers[i] = field::product(powers[i - 1], kPoint);
  return powers;
}
inline constexpr std::array<Value, kBlockWords> kPowers = make_powers();  // of the point, from 0 on

// Returns the sum of the words of `bytes` times the powers from 0 on: at most kBlockWords. What the last word lacks
// counts as 0.
Value of_block(const std::byte* data, uint64_t bytes);

namespace detail {  // each implementation alone, for tests
Value block_portable(const std::byte* data, uint64_t bytes);
#if defined(__x86_64__)
constexpr uint64_t kIfmaBytes = 256;  // from here on it is the faster one
bool have_ifma();
Value block_ifma(const std::byte* data, uint64_t bytes);
#endif
}  // namespace detail

}  // namespace vescale_ckpt::fingerprint
