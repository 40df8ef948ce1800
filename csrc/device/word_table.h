// The table of a sum of words: ranges of a device's memory, and where their bytes lie in their tensors. Bytes of a
// tensor are cut into words of 6 bytes, and word w counts times the w-th power of a point (fingerprint/fingerprint.h).
// The kernel reads it: plain data, fixed layout.
#pragma once

#include <cstdint>
#include <vector>

#include "base/field.h"

namespace vescale_ckpt::device {

// A lane reads 48 bytes, which are whole vectors of 16 and whole words of 6, then those one stride of its warp further.
inline constexpr uint32_t kSumLanes = 32, kLaneBytes = 48, kLaneWords = kLaneBytes / 6, kLaneSteps = 28;
inline constexpr uint32_t kSumStepBytes = kSumLanes * kLaneBytes, kSumPieceBytes = kLaneSteps * kSumStepBytes;

// One dimension over which a run repeats.
struct WordDim {
  uint64_t count;
  int64_t memory_stride;  // bytes
  uint64_t place_stride;  // bytes
};

// Runs of bytes, each of them contiguous on the device and in the tensor. Pieces are cut on the device, which aligns
// them; each run has as many, the last of which may be empty.
struct WordRow {
  uint64_t address;      // device address of the first run
  uint64_t place;        // its offset in the tensor, in bytes
  uint64_t run;          // bytes
  uint32_t first_piece;  // index of the row's first piece, ascending from row to row
  uint32_t run_pieces;   // pieces of each run
  uint32_t dims;         // number of dimensions, outermost first
  uint32_t dims_at;
};

struct alignas(16) Power {
  uint32_t limbs[4];
};

// For each step of a lane, the powers of the 9 words that its 48 bytes may touch.
using StepPowers = Power[kLaneSteps][kLaneWords + 1];

struct WordPowers {
  StepPowers steps;
  alignas(16) field::Value digits[8][256];  // of i * 256^k, to multiply by the power of any number
};

// The sum of a row, in columns of 32 bits: column i counts times 2^(32 i).
struct WordSum {
  uint64_t columns[4];
};

struct WordTable {
  std::vector<WordRow> rows;
  std::vector<WordDim> dims;
  uint32_t pieces = 0;  // of all rows
};

// A launch has room for so many.
inline constexpr uint32_t kWordRows = 8192;
inline constexpr uint32_t kWordDims = 8192;
inline constexpr uint32_t kWordPieces = 1u << 30;

// Bytes may begin in front of their first word, so sums have a factor of the point to this power.
inline constexpr uint32_t kLeadWords = 3;

// Returns how many pieces a run has at most, wherever it begins.
constexpr uint64_t pieces_of_run(uint64_t run) {
  return (run + 15 + kSumPieceBytes - 1) / kSumPieceBytes;
}

}  // namespace vescale_ckpt::device
