#include "hf/dequantize.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "base/error.h"

namespace vescale_ckpt::hf {
namespace {

// By the format's definition: a sign, four bits of exponent, three of mantissa, no infinity.
float float8(uint8_t byte) {
  const int exponent = (byte >> 3) & 15, mantissa = byte & 7;
  if (exponent == 15 && mantissa == 7) return std::numeric_limits<float>::quiet_NaN();
  const float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                        : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  return byte & 0x80 ? -magnitude : magnitude;
}

float widened(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

TEST(Dequantize, Float8HasEveryNumberAndTheScaleOfItsBlock) {
  constexpr uint64_t kMatrices = 2, kRows = 19, kColumns = 261;
  std::vector<uint8_t> numbers(kMatrices * kRows * kColumns);
  for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<uint8_t>(i * 7 + i / 256);
  for (const unsigned threads : {1u, 4u}) {
    for (const auto& [block_rows, block_columns] : {std::pair<uint64_t, uint64_t>{8, 32}, {1, 1000}, {64, 1}}) {
      const ScaledBox box{kMatrices, kRows, kColumns, block_rows / 2, block_columns / 3, block_rows, block_columns};
      std::vector<float> scales(kMatrices * box.scale_rows() * box.scale_columns());
      for (size_t i = 0; i < scales.size(); ++i) scales[i] = 0.37f * static_cast<float>(i + 1);
      std::vector<float> values(numbers.size());
      std::vector<uint16_t> halves(numbers.size());
      const auto bytes = [](auto& vector) { return reinterpret_cast<std::byte*>(vector.data()); };
      dequantize_float8(box, numbers.data(), scales.data(), ValueType::float32, bytes(values), threads);
      dequantize_float8(box, numbers.data(), scales.data(), ValueType::bfloat16, bytes(halves), threads);
      for (uint64_t i = 0; i < numbers.size(); ++i) {
        const uint64_t matrix = i / (kRows * kColumns), row = i / kColumns % kRows, column = i % kColumns;
        const uint64_t scale_row = matrix * box.scale_rows() + (row + box.first_row) / block_rows;
        const float scale = scales[scale_row * box.scale_columns() + (column + box.first_column) / block_columns];
        const float expected = float8(numbers[i]) * scale;
        if (std::isnan(expected)) {
          EXPECT_TRUE(std::isnan(values[i]) && std::isnan(widened(halves[i]))) << i;
          continue;
        }
        ASSERT_EQ(std::bit_cast<uint32_t>(values[i]), std::bit_cast<uint32_t>(expected)) << i;
        const float lower = widened(static_cast<uint16_t>(std::bit_cast<uint32_t>(expected) >> 16));
        const float upper = widened(static_cast<uint16_t>((std::bit_cast<uint32_t>(expected) >> 16) + 1));
        const float nearest = std::abs(expected - lower) < std::abs(upper - expected) ? lower : upper;
        if (std::abs(expected - lower) != std::abs(upper - expected)) {
          ASSERT_EQ(widened(halves[i]), nearest) << i;
        } else {
          ASSERT_EQ(halves[i] % 2, 0) << i;
        }
      }
    }
  }
}

TEST(Dequantize, Mxfp4HasEveryNumberAndExponent) {
  constexpr float kNumbers[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  constexpr uint64_t kGroups = 256 * 128;  // several batches
  std::vector<uint8_t> numbers(kGroups * kMxGroupBytes), exponents(kGroups);
  for (uint64_t group = 0; group < kGroups; ++group) {
    exponents[group] = static_cast<uint8_t>(group);
    for (uint64_t i = 0; i < kMxGroupBytes; ++i) {
      numbers[group * kMxGroupBytes + i] = static_cast<uint8_t>(group / 256 * kMxGroupBytes + i);
    }
  }
  std::vector<float> values(numbers.size() * 2);
  std::vector<uint16_t> halves(numbers.size() * 2);
  const auto bytes = [](auto& vector) { return reinterpret_cast<std::byte*>(vector.data()); };
  dequantize_mxfp4(kGroups, numbers.data(), exponents.data(), ValueType::float32, bytes(values), 3);
  dequantize_mxfp4(kGroups, numbers.data(), exponents.data(), ValueType::bfloat16, bytes(halves), 3);
  for (uint64_t i = 0; i < values.size(); ++i) {
    const int bits = i % 2 == 0 ? numbers[i / 2] & 15 : numbers[i / 2] >> 4;
    const float number = std::ldexp(kNumbers[bits & 7], exponents[i / 32] - 127);
    const float expected = bits & 8 ? -number : number;
    ASSERT_EQ(std::bit_cast<uint32_t>(values[i]), std::bit_cast<uint32_t>(expected)) << i;
    ASSERT_EQ(std::bit_cast<uint32_t>(widened(halves[i])), std::bit_cast<uint32_t>(expected)) << i;
  }
}

TEST(Dequantize, EmptyAndImpossibleBoxes) {
  const auto make = [](const ScaledBox& box) {
    dequantize_float8(box, nullptr, nullptr, ValueType::float32, nullptr, 2);
  };
  make({0, 3, 3, 0, 0, 2, 2});
  make({3, 0, 3, 0, 0, 2, 2});
  make({3, 3, 0, 0, 0, 2, 2});
  for (const ScaledBox& box : {ScaledBox{1, 1, 1, 0, 0, 0, 2}, {1, 1, 1, 2, 0, 2, 2}, {1, 1, 1, 0, 2, 2, 2}}) {
    EXPECT_THROW(make(box), Error);
  }
  dequantize_mxfp4(0, nullptr, nullptr, ValueType::float32, nullptr, 2);
}

}  // namespace
}  // namespace vescale_ckpt::hf
