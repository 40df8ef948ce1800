#include "fingerprint/words.h"

#include <cstring>
#include <numeric>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace vescale_ckpt::fingerprint {
namespace {

using field::product;
using field::reduced;
using field::shifted;
using field::sum;

// Two reads that fit registers: a copy of 6 bytes through memory would wait for the store, ten times as long.
uint64_t word_at(const std::byte* data) {
  uint32_t low = 0;
  uint16_t high = 0;
  std::memcpy(&low, data, sizeof(low));
  std::memcpy(&high, data + sizeof(low), sizeof(high));
  return low | (uint64_t{high} << 32);
}

}  // namespace

Value of_words(const std::byte* data, uint64_t words) {
#if defined(__x86_64__)
  static const bool kHaveIfma = detail::have_ifma();
  if (kHaveIfma) return detail::words_ifma(data, words);
#endif
  return detail::words_portable(data, words);
}

namespace detail {

Value words_portable(const std::byte* data, uint64_t words) {
  // The products of 48 and 64 bits add up to less than 2^122.
  Value low = 0, high = 0;
  for (uint64_t i = 0; i < words; ++i, data += kWordBytes) {
    const uint64_t word = word_at(data);
    low += Value{word} * static_cast<uint64_t>(kPowers[i]);
    high += Value{word} * static_cast<uint64_t>(kPowers[i] >> 64);
  }
  return sum(reduced(low), shifted(reduced(high), 64));
}

#if defined(__x86_64__)
bool have_ifma() {
  return __builtin_cpu_supports("avx512ifma") && __builtin_cpu_supports("avx512vbmi");
}

namespace {

// Half a block at a time: the table of powers leaves half of the fastest cache to the data.
constexpr uint64_t kHalfWords = kBlockWords / 2, kHalfBytes = kHalfWords * kWordBytes;

// Limbs of 43 bits of the powers, each in 64 bits.
using Limbs = std::array<std::array<uint64_t, kHalfWords>, 3>;
constexpr Limbs make_limbs() {
  Limbs limbs{};
  for (size_t limb = 0; limb < limbs.size(); ++limb) {
    for (size_t i = 0; i < kHalfWords; ++i) {
      limbs[limb][i] = static_cast<uint64_t>(kPowers[i] >> (43 * limb)) & ((uint64_t{1} << 43) - 1);
    }
  }
  return limbs;
}
alignas(64) constexpr Limbs kLimbs = make_limbs();

constexpr size_t kAhead = 1024;  // bytes that are asked for before they are used

// For each of eight numbers of 64 bits, its 6 bytes among 48.
constexpr std::array<uint8_t, 64> make_spread() {
  std::array<uint8_t, 64> spread{};
  for (unsigned byte = 0; byte < 64; ++byte) spread[byte] = static_cast<uint8_t>(byte / 8 * kWordBytes + byte % 8);
  return spread;
}
alignas(64) constexpr std::array<uint8_t, 64> kSpread = make_spread();

#define VESCALE_CKPT_INLINE __attribute__((always_inline)) inline
#define VESCALE_CKPT_IFMA __attribute__((target("avx512f,avx512bw,avx512vbmi,avx512ifma")))

// Sums of products of words and 43 bits of a power, which have 91 bits: two of 52. They are variables, and
// handed on by value, because the compiler keeps arrays in memory, and all whose address it gives away.
struct IfmaSums {
  __m512i low0{}, low1{}, low2{}, high0{}, high1{}, high2{};
};

VESCALE_CKPT_IFMA VESCALE_CKPT_INLINE __m512i eight_words(const std::byte* data) {
  const __m512i bytes = _mm512_maskz_loadu_epi8((uint64_t{1} << 48) - 1, data);
  return _mm512_maskz_permutexvar_epi8(0x3f3f3f3f3f3f3f3f, _mm512_load_si512(kSpread.data()), bytes);
}

VESCALE_CKPT_IFMA VESCALE_CKPT_INLINE void add_words(__m512i words, uint64_t first, IfmaSums& sums) {
  const __m512i powers0 = _mm512_load_si512(kLimbs[0].data() + first);
  const __m512i powers1 = _mm512_load_si512(kLimbs[1].data() + first);
  const __m512i powers2 = _mm512_load_si512(kLimbs[2].data() + first);
  sums.low0 = _mm512_madd52lo_epu64(sums.low0, words, powers0);
  sums.high0 = _mm512_madd52hi_epu64(sums.high0, words, powers0);
  sums.low1 = _mm512_madd52lo_epu64(sums.low1, words, powers1);
  sums.high1 = _mm512_madd52hi_epu64(sums.high1, words, powers1);
  sums.low2 = _mm512_madd52lo_epu64(sums.low2, words, powers2);
  sums.high2 = _mm512_madd52hi_epu64(sums.high2, words, powers2);
}

VESCALE_CKPT_IFMA Value sum_of_lanes(__m512i lanes) {
  alignas(64) std::array<uint64_t, 8> each;
  _mm512_store_si512(each.data(), lanes);
  return std::accumulate(each.begin(), each.end(), uint64_t{0});  // 512 numbers of 52 bits have fewer than 62
}

VESCALE_CKPT_IFMA Value total_of(IfmaSums sums) {
  // Below 2^128 together. The last one counts 2^138, which is 2^11.
  const Value some = sum_of_lanes(sums.low0) + (sum_of_lanes(sums.low1) << 43) + (sum_of_lanes(sums.high0) << 52) +
                     shifted(sum_of_lanes(sums.low2), 86) + shifted(sum_of_lanes(sums.high2), 11);
  return sum(reduced(some), shifted(sum_of_lanes(sums.high1), 95));
}

VESCALE_CKPT_IFMA Value half_ifma(const std::byte* data, uint64_t words) {
  IfmaSums sums;
  uint64_t i = 0;
  for (; i + 8 <= words; i += 8, data += 8 * kWordBytes) {
    _mm_prefetch(reinterpret_cast<const char*>(data) + kAhead, _MM_HINT_T0);
    add_words(eight_words(data), i, sums);
  }
  Value total = total_of(sums);
  for (; i < words; ++i, data += kWordBytes) total = sum(total, product(kPowers[i], word_at(data)));
  return total;
}

Value of_halves(Value first, Value second) {
  return sum(first, product(kPowers[kHalfWords], second));
}

// Both halves at once, so that powers are read once, and more products are independent. Data are asked for in order,
// one and a half blocks ahead: two streams within a page hide from the processor that it could do so itself.
VESCALE_CKPT_IFMA Value block_ifma(const std::byte* data) {
  constexpr size_t kFarAhead = 3 * kHalfBytes;
  const char* ahead = reinterpret_cast<const char*>(data) + kFarAhead;
  IfmaSums first, second;
  for (uint64_t i = 0; i < kHalfWords; i += 8, data += 8 * kWordBytes, ahead += 16 * kWordBytes) {
    _mm_prefetch(ahead, _MM_HINT_T0);
    _mm_prefetch(ahead + 8 * kWordBytes, _MM_HINT_T0);
    add_words(eight_words(data), i, first);
    add_words(eight_words(data + kHalfBytes), i, second);
  }
  return of_halves(total_of(first), total_of(second));
}

}  // namespace

Value words_ifma(const std::byte* data, uint64_t words) {
  if (words == kBlockWords) return block_ifma(data);
  if (words <= kHalfWords) return half_ifma(data, words);
  const Value first = half_ifma(data, kHalfWords);  // memory is read in order, which takes half the time
  return of_halves(first, half_ifma(data + kHalfBytes, words - kHalfWords));
}
#endif

}  // namespace detail
}  // namespace vescale_ckpt::fingerprint
