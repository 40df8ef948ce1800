#include "base/crc32.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace vescale_ckpt {
namespace {

constexpr uint32_t kPolynomial = 0xEDB88320u;  // reflected: bit 31 is x^0

// a * b mod P. Reflected: the highest bit stands for x^0.
constexpr uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = 0x80000000u; bit != 0; bit >>= 1) {
    if (a & bit) product ^= b;
    b = (b & 1) ? (b >> 1) ^ kPolynomial : b >> 1;
  }
  return product;
}

// x^(2^k) mod P for k = 0 … 66: enough for any length in bits below 2^67.
constexpr auto kSquares = [] {
  std::array<uint32_t, 67> squares{};
  squares[0] = 0x40000000u;
  for (size_t k = 1; k < squares.size(); ++k) squares[k] = multiply(squares[k - 1], squares[k - 1]);
  return squares;
}();

// x^(n * 2^shift) mod P
constexpr uint32_t power_of_x(uint64_t n, unsigned shift) {
  uint32_t power = 0x80000000u;
  for (unsigned k = shift; n != 0; n >>= 1, ++k) {
    if (n & 1) power = multiply(power, kSquares[k]);
  }
  return power;
}

constexpr auto kTables = [] {
  std::array<std::array<uint32_t, 256>, 8> tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc & 1) ? (crc >> 1) ^ kPolynomial : crc >> 1;
    tables[0][byte] = crc;
  }
  for (size_t slice = 1; slice < tables.size(); ++slice) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t previous = tables[slice - 1][byte];
      tables[slice][byte] = (previous >> 8) ^ tables[0][previous & 0xff];
    }
  }
  return tables;
}();

// The update without the inversions at both ends, eight bytes a step.
uint32_t update_table(uint32_t state, const unsigned char* data, size_t size) {
  for (; size >= 8; data += 8, size -= 8) {
    uint64_t word;
    std::memcpy(&word, data, 8);
    word ^= state;
    state = 0;
    for (size_t byte = 0; byte < 8; ++byte) state ^= kTables[7 - byte][(word >> (8 * byte)) & 0xff];
  }
  for (; size != 0; ++data, --size) state = (state >> 8) ^ kTables[0][(state ^ *data) & 0xff];
  return state;
}

#if defined(__x86_64__) || defined(__aarch64__)
// Folding by carry-less multiplication: an accumulator A that lies n bits before the data D may be replaced
// by A * x^n + D. The two halves of a 128-bit accumulator need x^(n+32) and x^(n-32), doubled because the
// product of reflected numbers comes out one bit low (Gopal et al., Intel, 2009).
constexpr uint64_t fold_low(unsigned bits) {
  return uint64_t{power_of_x(bits + 32, 0)} << 1;
}
constexpr uint64_t fold_high(unsigned bits) {
  return uint64_t{power_of_x(bits - 32, 0)} << 1;
}
static_assert(fold_low(512) == 0x154442bd4 && fold_high(512) == 0x1c6e41596);
static_assert(fold_low(128) == 0x1751997d0 && fold_high(128) == 0x0ccaa009e);

// Bytes that are asked for before they are folded. Without it an x86 core reads from memory at three quarters of this
// speed: the processor's own prefetching stops at each page.
constexpr size_t kAhead = 2048;

// A lane is 128 bits, the lower half first.
#if defined(__x86_64__)
#define VESCALE_CKPT_FOLDS __attribute__((target("pclmul,sse4.1")))
using Lane = __m128i;

VESCALE_CKPT_FOLDS inline Lane load(const unsigned char* data, size_t lane) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data) + lane);
}

VESCALE_CKPT_FOLDS inline void store(unsigned char* to, size_t lane, Lane bytes) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to) + lane, bytes);
}

VESCALE_CKPT_FOLDS inline Lane fold_factor(uint64_t low, uint64_t high) {
  return _mm_set_epi64x(static_cast<int64_t>(high), static_cast<int64_t>(low));
}

VESCALE_CKPT_FOLDS inline Lane add(Lane lane, uint32_t state) {
  return _mm_xor_si128(lane, _mm_cvtsi32_si128(static_cast<int>(state)));
}

VESCALE_CKPT_FOLDS inline Lane fold(Lane accumulator, Lane factor, Lane data) {
  return _mm_xor_si128(data, _mm_xor_si128(_mm_clmulepi64_si128(accumulator, factor, 0x00),
                                           _mm_clmulepi64_si128(accumulator, factor, 0x11)));
}

VESCALE_CKPT_FOLDS inline void prefetch(const unsigned char* data, size_t bytes) {
  for (size_t line = 0; line < bytes; line += 64) {
    _mm_prefetch(reinterpret_cast<const char*>(data + kAhead + line), _MM_HINT_T0);
  }
}
#else
#define VESCALE_CKPT_FOLDS __attribute__((target("+crypto")))
using Lane = uint64x2_t;

VESCALE_CKPT_FOLDS inline Lane load(const unsigned char* data, size_t lane) {
  return vreinterpretq_u64_u8(vld1q_u8(data + 16 * lane));
}

VESCALE_CKPT_FOLDS inline void store(unsigned char* to, size_t lane, Lane bytes) {
  vst1q_u8(to + 16 * lane, vreinterpretq_u8_u64(bytes));
}

VESCALE_CKPT_FOLDS inline Lane fold_factor(uint64_t low, uint64_t high) {
  return vcombine_u64(vcreate_u64(low), vcreate_u64(high));
}

VESCALE_CKPT_FOLDS inline Lane add(Lane lane, uint32_t state) {
  return veorq_u64(lane, fold_factor(state, 0));
}

VESCALE_CKPT_FOLDS inline Lane fold(Lane accumulator, Lane factor, Lane data) {
  const auto low = vmull_p64(vgetq_lane_u64(accumulator, 0), vgetq_lane_u64(factor, 0));
  const auto high = vmull_high_p64(vreinterpretq_p64_u64(accumulator), vreinterpretq_p64_u64(factor));
  return veorq_u64(data, veorq_u64(vreinterpretq_u64_p128(low), vreinterpretq_u64_p128(high)));
}

VESCALE_CKPT_FOLDS inline void prefetch(const unsigned char* data, size_t bytes) {
  for (size_t line = 0; line < bytes; line += 64) __builtin_prefetch(data + kAhead + line);
}
#endif

// What remains after folding is 16 bytes whose checksum from state 0 is the answer, then the unfolded rest.
VESCALE_CKPT_FOLDS uint32_t finish_fold(Lane accumulator, const unsigned char* data, size_t size) {
  const Lane by_128 = fold_factor(fold_low(128), fold_high(128));
  for (; size >= 16; data += 16, size -= 16) accumulator = fold(accumulator, by_128, load(data, 0));
  alignas(16) unsigned char rest[16];
  store(rest, 0, accumulator);
  return ~update_table(update_table(0, rest, sizeof rest), data, size);
}

// Eight lanes: on x86 a fold takes seven cycles and starts every two.
template <bool kCopy>
VESCALE_CKPT_FOLDS uint32_t with_folding(uint32_t crc, const unsigned char* data, size_t size, unsigned char* to) {
  constexpr size_t kLanes = 8, kStep = 16 * kLanes;
  if (size < kStep) return detail::crc32_table(crc, data, size, to);
  Lane lanes[kLanes];
  const Lane by_1024 = fold_factor(fold_low(1024), fold_high(1024));
  for (size_t lane = 0; lane < kLanes; ++lane) {
    lanes[lane] = load(data, lane);
    if (kCopy) store(to, lane, lanes[lane]);
  }
  lanes[0] = add(lanes[0], ~crc);
  for (data += kStep, to += kCopy ? kStep : 0, size -= kStep; size >= kStep;
       data += kStep, to += kCopy ? kStep : 0, size -= kStep) {
    prefetch(data, kStep);
#pragma GCC unroll 8
    for (size_t lane = 0; lane < kLanes; ++lane) {
      const Lane bytes = load(data, lane);
      if (kCopy) store(to, lane, bytes);
      lanes[lane] = fold(lanes[lane], by_1024, bytes);
    }
  }
  if (kCopy && size != 0) std::memcpy(to, data, size);
  const Lane by_128 = fold_factor(fold_low(128), fold_high(128));
  for (size_t lane = 1; lane < kLanes; ++lane) lanes[lane] = fold(lanes[lane - 1], by_128, lanes[lane]);
  return finish_fold(lanes[kLanes - 1], kCopy ? to : data, size);
}
#endif

#if defined(__x86_64__)
__attribute__((target("avx512f,vpclmulqdq"))) inline __m512i load_wide(const unsigned char* data, size_t lane) {
  return _mm512_loadu_si512(data + 64 * lane);
}

__attribute__((target("avx512f,vpclmulqdq,pclmul,sse4.1"))) inline __m512i fold_factor_wide(uint64_t low,
                                                                                            uint64_t high) {
  const auto l = static_cast<int64_t>(low), h = static_cast<int64_t>(high);
  return _mm512_set_epi64(h, l, h, l, h, l, h, l);
}

__attribute__((target("avx512f,vpclmulqdq"))) inline __m512i fold(__m512i accumulator, __m512i factor, __m512i data) {
  return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(accumulator, factor, 0x00),
                                   _mm512_clmulepi64_epi128(accumulator, factor, 0x11), data, 0x96);
}

template <bool kCopy>
__attribute__((target("avx512f,vpclmulqdq,pclmul,sse4.1"))) uint32_t with_avx512(uint32_t crc,
                                                                                 const unsigned char* data, size_t size,
                                                                                 unsigned char* to) {
  constexpr size_t kLanes = 4, kStep = 64 * kLanes;
  if (size < kStep) return with_folding<kCopy>(crc, data, size, to);
  __m512i lanes[kLanes];
  for (size_t lane = 0; lane < kLanes; ++lane) {
    lanes[lane] = load_wide(data, lane);
    if (kCopy) _mm512_storeu_si512(to + 64 * lane, lanes[lane]);
  }
  lanes[0] = _mm512_xor_si512(lanes[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(~crc))));
  const __m512i by_2048 = fold_factor_wide(fold_low(2048), fold_high(2048));
  for (data += kStep, to += kCopy ? kStep : 0, size -= kStep; size >= kStep;
       data += kStep, to += kCopy ? kStep : 0, size -= kStep) {
    prefetch(data, kStep);
#pragma GCC unroll 4
    for (size_t lane = 0; lane < kLanes; ++lane) {
      const __m512i bytes = load_wide(data, lane);
      if (kCopy) _mm512_storeu_si512(to + 64 * lane, bytes);
      lanes[lane] = fold(lanes[lane], by_2048, bytes);
    }
  }
  if (kCopy && size != 0) std::memcpy(to, data, size);
  const __m512i by_512 = fold_factor_wide(fold_low(512), fold_high(512));
  for (size_t lane = 1; lane < kLanes; ++lane) lanes[lane] = fold(lanes[lane - 1], by_512, lanes[lane]);
  alignas(64) unsigned char folded[64];
  _mm512_store_si512(folded, lanes[kLanes - 1]);
  const __m128i by_128 = fold_factor(fold_low(128), fold_high(128));
  __m128i accumulator = load(folded, 0);
  for (size_t lane = 1; lane < 4; ++lane) accumulator = fold(accumulator, by_128, load(folded, lane));
  return finish_fold(accumulator, kCopy ? to : data, size);
}
#endif

using Function = uint32_t (*)(uint32_t, const unsigned char*, size_t, unsigned char*);

Function choose() {
#if defined(__x86_64__)
  if (detail::have_avx512()) return detail::crc32_avx512;
#endif
#if defined(__x86_64__) || defined(__aarch64__)
  if (detail::have_folding()) return detail::crc32_folding;
#endif
  return detail::crc32_table;
}

const Function kChosen = choose();

}  // namespace

namespace detail {

uint32_t crc32_table(uint32_t crc, const unsigned char* data, size_t size, unsigned char* to) {
  if (to != nullptr && size != 0) data = static_cast<unsigned char*>(std::memcpy(to, data, size));
  return ~update_table(~crc, data, size);
}

#if defined(__x86_64__) || defined(__aarch64__)
bool have_folding() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
#else
  return (getauxval(AT_HWCAP) & HWCAP_PMULL) != 0;
#endif
}

uint32_t crc32_folding(uint32_t crc, const unsigned char* data, size_t size, unsigned char* to) {
  return to == nullptr ? with_folding<false>(crc, data, size, to) : with_folding<true>(crc, data, size, to);
}
#endif

#if defined(__x86_64__)
bool have_avx512() {
  return have_folding() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq");
}

uint32_t crc32_avx512(uint32_t crc, const unsigned char* data, size_t size, unsigned char* to) {
  return to == nullptr ? with_avx512<false>(crc, data, size, to) : with_avx512<true>(crc, data, size, to);
}
#endif

}  // namespace detail

uint32_t crc32(uint32_t crc, const void* data, size_t size) {
  return kChosen(crc, static_cast<const unsigned char*>(data), size, nullptr);
}

uint32_t copy_crc32(void* target, const void* source, size_t size, uint32_t crc) {
  return kChosen(crc, static_cast<const unsigned char*>(source), size, static_cast<unsigned char*>(target));
}

uint32_t crc32_combine(uint32_t crc_a, uint32_t crc_b, uint64_t size_b) {
  if (crc_a == 0) return crc_b;  // saves the power: B is all there is, or A counts for nothing
  return multiply(power_of_x(size_b, 3), crc_a) ^ crc_b;
}

}  // namespace vescale_ckpt
