// Arithmetic modulo the prime 2^127 - 1. A value is its least representative; `product` and `sum` expect and return
// such. It compiles for hosts and devices.
#pragma once

#include <cstdint>

namespace vescale_ckpt::field {

__extension__ using Value = unsigned __int128;

constexpr Value kPrime = (Value{1} << 127) - 1;

// Returns any 128-bit number modulo the prime.
constexpr Value reduced(Value number) {
  number = (number & kPrime) + (number >> 127);
  return number >= kPrime ? number - kPrime : number;
}

constexpr Value sum(Value left, Value right) {
  return reduced(left + right);
}

constexpr Value product(Value left, Value right) {
  const auto low = [](Value value) { return static_cast<uint64_t>(value); };
  const auto high = [](Value value) { return static_cast<uint64_t>(value >> 64); };
  const Value middle =
      Value{high(left)} * low(right) + Value{low(left)} * high(right);  // < 2^128: the highs have 63 bits
  const Value bottom = Value{low(left)} * low(right), lower = bottom + (middle << 64);
  const Value upper = Value{high(left)} * high(right) + (middle >> 64) + (lower < bottom ? 1 : 0);
  return sum(lower & kPrime, reduced((upper << 1) | (lower >> 127)));  // 2^128 is 2
}

// Returns 2^bits * value: a rotation, because 2^127 is 1.
constexpr Value shifted(Value value, unsigned bits) {
  return bits == 0 ? value : ((value << bits) & kPrime) | (value >> (127 - bits));
}

constexpr Value power(Value base, Value exponent) {
  Value result = 1;
  for (; exponent != 0; exponent >>= 1, base = product(base, base)) {
    if ((exponent & 1) != 0) result = product(result, base);
  }
  return result;
}

}  // namespace vescale_ckpt::field
