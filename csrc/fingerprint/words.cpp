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

// Up to 6 bytes.
uint64_t part_of_word(const std::byte* data, uint64_t bytes) {
  uint64_t word = 0;
  std::memcpy(&word, data, bytes);
  return word;
}

}  // namespace

Value of_block(const std::byte* data, uint64_t bytes) {
#if defined(__x86_64__)
  static const bool kHaveIfma = detail::have_ifma();
  if (kHaveIfma && bytes >= detail::kIfmaBytes) return detail::block_ifma(data, bytes);
#endif
  return detail::block_portable(data, bytes);
}

namespace detail {

Value block_portable(const std::byte* data, uint64_t bytes) {
  // The products of 48 and 64 bits add up to less than 2^122.
  Value low = 0, high = 0;
  const auto add = [&](uint64_t word, uint64_t i) {
    low += Value{word} * static_cast<uint64_t>(kPowers[i]);
    high += Value{word} * static_cast<uint64_t>(kPowers[i] >> 64);
  };
  const uint64_t words = bytes / kWordBytes;
  for (uint64_t i = 0; i < words; ++i) add(word_at(data + i * kWordBytes), i);
  if (words * kWordBytes < bytes) add(part_of_word(data + words * kWordBytes, bytes % kWordBytes), words);
  return sum(reduced(low), shifted(reduced(high), 64));
}

#if defined(__x86_64__)
bool have_ifma() {
  return __builtin_cpu_supports("avx512ifma") && __builtin_cpu_supports("avx512vbmi");
}

// The instructions multiply 52 bits, so that a power takes three limbs of 43. Products of words and limbs share
// multiplications (Winograd, "A new algorithm for inner product", 1968): for two words a, b and their limbs j, k,
//     a j + b k = (a + k) (b + j) - a b - j k
// where a b serves all three limbs, and the j k are constants: four multiplications in place of six.
//
// A group has 32 words: eight pairs, and eight pairs behind them which are added up apart, because their powers are the
// same but for a common factor. So powers are loaded half as often: loads, not products, would be the limit, and would
// leave the processor no time to fetch memory ahead by itself. Prefetch instructions make it slower.
namespace {

constexpr uint64_t kLanes = 8, kPairWords = 2 * kLanes, kGroupWords = 2 * kPairWords;
constexpr uint64_t kGroupBytes = kGroupWords * kWordBytes, kGroups = kBlockWords / kGroupWords;
constexpr unsigned kLimbs = 3, kLimbBits = 43, kProductBits = 52;

// Limbs of the powers of the first pairs of a group.
struct alignas(64) GroupLimbs {
  uint64_t first[kLimbs][kLanes], second[kLimbs][kLanes];
};

constexpr std::array<GroupLimbs, kGroups> make_limbs() {
  std::array<GroupLimbs, kGroups> groups{};
  for (size_t group = 0; group < kGroups; ++group) {
    for (unsigned limb = 0; limb < kLimbs; ++limb) {
      for (size_t lane = 0; lane < kLanes; ++lane) {
        const Value* const powers = &kPowers[group * kGroupWords + lane];
        const auto limb_of = [&](Value power) {
          return static_cast<uint64_t>(power >> (kLimbBits * limb)) & ((uint64_t{1} << kLimbBits) - 1);
        };
        groups[group].first[limb][lane] = limb_of(powers[0]);
        groups[group].second[limb][lane] = limb_of(powers[kLanes]);
      }
    }
  }
  return groups;
}
constexpr std::array<GroupLimbs, kGroups> kGroupLimbs = make_limbs();

// For each number of groups, the sum of the products of their limbs, negated.
constexpr std::array<Value, kGroups + 1> make_constants() {
  std::array<Value, kGroups + 1> constants{};
  for (size_t group = 0; group < kGroups; ++group) {
    Value total = constants[group];
    for (unsigned limb = 0; limb < kLimbs; ++limb) {
      Value products = 0;
      for (size_t lane = 0; lane < kLanes; ++lane) {
        products += Value{kGroupLimbs[group].first[limb][lane]} * kGroupLimbs[group].second[limb][lane];
      }
      total = sum(total, field::kPrime - shifted(products, kLimbBits * limb));
    }
    constants[group + 1] = total;
  }
  return constants;
}
constexpr std::array<Value, kGroups + 1> kConstants = make_constants();

// For each of eight numbers of 64 bits, its 6 bytes among 48, which begin at byte `from` of a vector.
constexpr std::array<uint8_t, 64> make_spread(unsigned from) {
  std::array<uint8_t, 64> spread{};
  for (unsigned byte = 0; byte < 64; ++byte) {
    spread[byte] = static_cast<uint8_t>(from + byte / 8 * kWordBytes + byte % 8);
  }
  return spread;
}
constexpr unsigned kBehind = 64 - kLanes * kWordBytes;  // the words of a vector that ends with them
alignas(64) constexpr std::array<uint8_t, 64> kSpread = make_spread(0), kSpreadBehind = make_spread(kBehind);

#define VESCALE_CKPT_INLINE __attribute__((always_inline)) inline
#define VESCALE_CKPT_IFMA __attribute__((target("avx512f,avx512bw,avx512vbmi,avx512ifma")))

// They are variables, not arrays, because the compiler keeps arrays in memory.
struct Products {
  __m512i low{}, high{};  // bits below 52 of each product, and the others
};
struct PairSums {
  Products words, limb0, limb1, limb2;
};

VESCALE_CKPT_IFMA VESCALE_CKPT_INLINE __m512i eight_words(const std::byte* data,
                                                          const std::array<uint8_t, 64>& spread) {
  return _mm512_maskz_permutexvar_epi8(0x3f3f3f3f3f3f3f3f, _mm512_load_si512(spread.data()), _mm512_loadu_si512(data));
}

VESCALE_CKPT_IFMA VESCALE_CKPT_INLINE void add_products(__m512i left, __m512i right, Products& sums) {
  sums.low = _mm512_madd52lo_epu64(sums.low, left, right);
  sums.high = _mm512_madd52hi_epu64(sums.high, left, right);
}

VESCALE_CKPT_IFMA VESCALE_CKPT_INLINE void add_limb(__m512i first, __m512i second, const GroupLimbs& limbs, int limb,
                                                    Products& sums) {
  add_products(_mm512_add_epi64(first, _mm512_load_si512(limbs.second[limb])),
               _mm512_add_epi64(second, _mm512_load_si512(limbs.first[limb])), sums);
}

VESCALE_CKPT_IFMA VESCALE_CKPT_INLINE void add_pairs(__m512i first, __m512i second, const GroupLimbs& limbs,
                                                     PairSums& sums) {
  add_products(first, second, sums.words);
  add_limb(first, second, limbs, 0, sums.limb0);
  add_limb(first, second, limbs, 1, sums.limb1);
  add_limb(first, second, limbs, 2, sums.limb2);
}

VESCALE_CKPT_IFMA VESCALE_CKPT_INLINE void add_group(const std::byte* data, const GroupLimbs& limbs, PairSums& sums,
                                                     PairSums& sums_behind) {
  constexpr uint64_t kVector = kLanes * kWordBytes;
  // No byte outside of the group is read.
  add_pairs(eight_words(data, kSpread), eight_words(data + kVector, kSpread), limbs, sums);
  add_pairs(eight_words(data + 2 * kVector - kBehind, kSpreadBehind),
            eight_words(data + 3 * kVector - kBehind, kSpreadBehind), limbs, sums_behind);
}

VESCALE_CKPT_IFMA VESCALE_CKPT_INLINE Value total_of(const Products& sums) {
  const auto lanes = [](__m512i vector) VESCALE_CKPT_IFMA {
    alignas(64) std::array<uint64_t, kLanes> each;
    _mm512_store_si512(each.data(), vector);
    return std::accumulate(each.begin(), each.end(), uint64_t{0});  // 256 numbers of 52 bits have 60
  };
  return lanes(sums.low) + (Value{lanes(sums.high)} << kProductBits);
}

VESCALE_CKPT_IFMA VESCALE_CKPT_INLINE Value total_of(const PairSums& sums, uint64_t groups) {
  const Value minus = field::kPrime - total_of(sums.words);
  Value total = kConstants[groups];
  total = sum(total, sum(total_of(sums.limb0), minus));
  total = sum(total, shifted(sum(total_of(sums.limb1), minus), kLimbBits));
  return sum(total, shifted(sum(total_of(sums.limb2), minus), 2 * kLimbBits));
}

}  // namespace

VESCALE_CKPT_IFMA Value block_ifma(const std::byte* data, uint64_t bytes) {
  PairSums sums, sums_behind;
  uint64_t groups = bytes / kGroupBytes;
  for (uint64_t group = 0; group < groups; ++group, data += kGroupBytes) {
    add_group(data, kGroupLimbs[group], sums, sums_behind);
  }
  if (const uint64_t rest = bytes % kGroupBytes; rest != 0) {
    alignas(64) std::array<std::byte, kGroupBytes> padded{};
    std::memcpy(padded.data(), data, rest);
    add_group(padded.data(), kGroupLimbs[groups++], sums, sums_behind);
  }
  return sum(total_of(sums, groups), product(kPowers[kPairWords], total_of(sums_behind, groups)));
}
#endif

}  // namespace detail
}  // namespace vescale_ckpt::fingerprint
