#include "hf/dequantize.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/error.h"
#include "base/workers.h"

// The compiler vectorises these loops. At -O2 it does so only where it is told to.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC optimize("O3")
#endif

// For AVX2, too, which is chosen when the library is loaded; ThreadSanitizer does not run by then.
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
#define VESCALE_CKPT_WIDE __attribute__((target_clones("avx2", "default")))
#else
#define VESCALE_CKPT_WIDE
#endif

namespace vescale_ckpt::hf {
namespace {

static_assert(std::endian::native == std::endian::little);

// Without a branch, which would keep a loop from being vectorised.
[[gnu::always_inline]] inline uint32_t choose(bool first, uint32_t a, uint32_t b) {
  const uint32_t mask = 0u - static_cast<uint32_t>(first);
  return (a & mask) | (b & ~mask);
}

// No subnormal operands, which are slow: a subnormal number is three bits times 2^-9.
[[gnu::always_inline]] inline float float8(uint32_t byte) {
  const uint32_t bits = byte & 0x7f, sign = (byte & 0x80) << 24;
  const float subnormal = static_cast<float>(static_cast<int32_t>(bits & 7)) * 0x1p-9f;
  const uint32_t normal = (bits << 20) + (120u << 23);
  const uint32_t magnitude = choose(bits < 8, std::bit_cast<uint32_t>(subnormal), normal);
  return std::bit_cast<float>(choose(bits == 0x7f, 0x7fc00000, magnitude) | sign);
}

[[gnu::always_inline]] inline uint16_t to_bfloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to nearest even
  return static_cast<uint16_t>(choose((bits & 0x7fffffff) > 0x7f800000, 0x7fc0, rounded));
}

template <typename Value>
[[gnu::always_inline]] inline Value as(float value) {
  if constexpr (sizeof(Value) == 2) {
    return to_bfloat16(value);
  } else {
    return value;
  }
}

template <typename Value>
[[gnu::always_inline]] inline void scale_run(const uint8_t* __restrict numbers, uint64_t count, float scale,
                                             Value* __restrict values) {
  for (uint64_t i = 0; i < count; ++i) values[i] = as<Value>(float8(numbers[i]) * scale);
}

// One row. `scales`: those of its blocks.
template <typename Value>
VESCALE_CKPT_WIDE void float8_row(const ScaledBox& box, const uint8_t* numbers, const float* scales, std::byte* bytes) {
  auto* const values = reinterpret_cast<Value*>(bytes);
  uint64_t end = std::min(box.columns, box.block_columns - box.first_column);
  for (uint64_t at = 0; at < box.columns; ++scales) {
    scale_run(numbers + at, end - at, *scales, values + at);
    at = end;
    end = at + std::min(box.columns - at, box.block_columns);
  }
}

// The bits of a number of 4 bits as a float: a sign, two bits of exponent, one of mantissa.
[[gnu::always_inline]] inline float float4(uint32_t number) {
  const uint32_t magnitude = number & 7, sign = (number & 8) << 28;
  const uint32_t normal = (magnitude << 22) + (126u << 23);
  const uint32_t subnormal = magnitude * 0x3f000000u;  // 0 or 0.5
  return std::bit_cast<float>(choose(magnitude < 2, subnormal, normal) | sign);
}

// Two values of a byte in one store.
template <typename Value>
[[gnu::always_inline]] inline auto pair_of(float low, float high) {
  if constexpr (sizeof(Value) == 2) {  // no rounding: a number and a power of two have few bits
    return (std::bit_cast<uint32_t>(high) & 0xffff0000u) | std::bit_cast<uint32_t>(low) >> 16;
  } else {
    return static_cast<uint64_t>(std::bit_cast<uint32_t>(high)) << 32 | std::bit_cast<uint32_t>(low);
  }
}

template <typename Value>
[[gnu::always_inline]] inline void mxfp4_group(const uint8_t* __restrict numbers, float factor, float scale,
                                               std::byte* __restrict values) {
  for (uint64_t i = 0; i < kMxGroupBytes; ++i) {
    const float low = float4(numbers[i] & 15u) * factor, high = float4(numbers[i] >> 4u) * factor;
    const auto both = pair_of<Value>(low * scale, high * scale);
    std::memcpy(values + i * sizeof both, &both, sizeof both);
  }
}

template <typename Value>
VESCALE_CKPT_WIDE void mxfp4_groups(uint64_t groups, const uint8_t* numbers, const uint8_t* exponents,
                                    std::byte* values) {
  for (uint64_t group = 0; group < groups; ++group, numbers += kMxGroupBytes) {
    const uint32_t exponent = exponents[group];
    if (exponent == 255) [[unlikely]] {  // no float32 is 2^128, but half of it times a number is one
      mxfp4_group<Value>(numbers, 2, 0x1p127f, values);
    } else {
      mxfp4_group<Value>(numbers, 1, exponent == 0 ? 0x1p-127f : std::bit_cast<float>(exponent << 23), values);
    }
    values += 2 * kMxGroupBytes * sizeof(Value);
  }
}

uint64_t size_of(ValueType type) {
  return type == ValueType::float32 ? sizeof(float) : sizeof(uint16_t);
}

constexpr uint64_t kBatchNumbers = 256 << 10;  // of a thread at a time

}  // namespace

void dequantize_float8(const ScaledBox& box, const uint8_t* numbers, const float* scales, ValueType type,
                       std::byte* values, unsigned threads) {
  if (box.block_rows == 0 || box.block_columns == 0 || box.first_row >= box.block_rows ||
      box.first_column >= box.block_columns) {
    throw Error::invalid("a box of scaled numbers begins inside of a block");
  }
  if (box.rows == 0 || box.columns == 0) return;
  const auto row = type == ValueType::float32 ? float8_row<float> : float8_row<uint16_t>;
  const uint64_t scale_rows = box.scale_rows(), scale_columns = box.scale_columns(), bytes = size_of(type);
  parallel_for(threads, box.matrices * box.rows, std::max<uint64_t>(1, kBatchNumbers / box.columns), [&] {
    return [&](size_t i) {
      const uint64_t scale_row = i / box.rows * scale_rows + (box.first_row + i % box.rows) / box.block_rows;
      row(box, numbers + i * box.columns, scales + scale_row * scale_columns, values + i * box.columns * bytes);
    };
  });
}

void dequantize_mxfp4(uint64_t groups, const uint8_t* numbers, const uint8_t* exponents, ValueType type,
                      std::byte* values, unsigned threads) {
  const auto convert = type == ValueType::float32 ? mxfp4_groups<float> : mxfp4_groups<uint16_t>;
  constexpr uint64_t kBatch = kBatchNumbers / kMxGroupBytes;
  parallel_for(threads, (groups + kBatch - 1) / kBatch, 1, [&] {
    return [&](size_t i) {
      const uint64_t begin = i * kBatch, count = std::min(kBatch, groups - begin);
      convert(count, numbers + begin * kMxGroupBytes, exponents + begin,
              values + begin * 2 * kMxGroupBytes * size_of(type));
    };
  });
}

}  // namespace vescale_ckpt::hf

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC pop_options
#endif
