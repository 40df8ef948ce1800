// Values of quantised tensors: numbers of few bits, and a scale for each block of them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace vescale_ckpt::hf {

enum class ValueType { float32, bfloat16 };

// A dense box of matrices, one behind another, whose elements have a scale for each block of block_rows x block_columns
// of their matrix. The box begins inside of a block.
struct ScaledBox {
  uint64_t matrices, rows, columns;    // of the box
  uint64_t first_row, first_column;    // of the box, in the first block; less than the block's size
  uint64_t block_rows, block_columns;  // at least 1
  uint64_t scale_rows() const { return (first_row + rows + block_rows - 1) / block_rows; }
  uint64_t scale_columns() const { return (first_column + columns + block_columns - 1) / block_columns; }
};

// Writes number * scale of float8_e4m3fn numbers, computed in float32, on several threads. `scales`: those of the
// blocks that the box touches, matrices x scale_rows x scale_columns. `values` has room for the whole box. Throws Error
// (invalid).
void dequantize_float8(const ScaledBox& box, const uint8_t* numbers, const float* scales, ValueType type,
                       std::byte* values, unsigned threads);

inline constexpr uint64_t kMxGroupBytes = 16;  // 32 numbers of 4 bits, the lower half of a byte first

// Writes the values of groups of float4_e2m1 numbers, 32 each. The scale of a group is 2^(exponent - 127).
void dequantize_mxfp4(uint64_t groups, const uint8_t* numbers, const uint8_t* exponents, ValueType type,
                      std::byte* values, unsigned threads);

}  // namespace vescale_ckpt::hf
