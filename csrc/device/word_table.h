// The table of a sum of words: ranges of a device's memory, and where their bytes lie in their tensors. Bytes of a
// tensor are cut into words of 6 bytes, and word w counts times the w-th power of a point (fingerprint/fingerprint.h).
// The kernel reads it: plain data, fixed layout.
#pragma once

#include <cstdint>
#include <vector>

#include "base/field.h"

namespace vescale_ckpt::device {

// A warp adds up a piece of a run. In each step its lanes take one word each, which follow each other.
inline constexpr uint32_t kSumWordBytes = 6, kSumLanes = 32, kSumSteps = 256;
inline constexpr uint32_t kSumStepBytes = kSumLanes * kSumWordBytes, kSumPieceWords = kSumSteps * kSumLanes;

// Runs of equal length at equal distances, each of them contiguous on the device and in the tensor.
struct WordRow {
  uint64_t address;       // device address of the first run
  uint64_t place;         // its offset in the tensor, in bytes
  uint64_t run;           // bytes of each run
  int64_t memory_stride;  // bytes from run to run
  uint64_t place_stride;  // the same in the tensor
  uint32_t first_piece;   // index of the row's first piece, ascending from row to row
  uint32_t run_pieces;    // pieces of each run
};

// Powers of the point.
struct WordPowers {
  field::Value steps[kSumSteps];  // for each step of a lane
  field::Value digits[8][256];    // of i * 256^k, to multiply by the power of any number
};

// The sum of a row, in columns of 32 bits: column i counts times 2^(32 i).
struct WordSum {
  uint64_t columns[4];
};

struct WordTable {
  std::vector<WordRow> rows;
  uint32_t pieces = 0;  // of all rows
};

// A launch has room for so many.
inline constexpr uint32_t kWordRows = 8192;
inline constexpr uint32_t kWordPieces = 1u << 30;

// Returns how many pieces a run has at most, wherever it begins. The last one may be empty.
constexpr uint64_t pieces_of_run(uint64_t run) {
  return (run / kSumWordBytes + 2) / kSumPieceWords + 1;
}

}  // namespace vescale_ckpt::device
