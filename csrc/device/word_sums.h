// Does the work of one lane of the kernel that adds up words. kernels.cu compiles it for the device, and the tests
// compile it for the host, where they compare it with the fingerprints of the host's own code.
//
// A product of a word and a power has 48 by 127 bits. As two halves of 24 bits times four limbs of 32, it is 8
// multiply-adds into columns of 64 bits, which take 256 products of 56 bits without a carry. Carries are resolved once
// for each lane and piece.
#pragma once

#include <cstdint>
#include <cstring>

#include "base/field.h"
#include "device/pack_rows.h"
#include "device/word_table.h"

#ifdef __CUDACC__
#define VESCALE_CKPT_UNROLL _Pragma("unroll")
#else
#define VESCALE_CKPT_UNROLL
#endif

namespace vescale_ckpt::device {

constexpr uint32_t kVectorBytes = 16, kVectorWords = kVectorBytes / 4, kHalfBytes = 3, kHalfBits = 8 * kHalfBytes;

static_assert(kLaneSteps * (kLaneWords + 1) <= 256, "a column has no room for the products of a lane");
static_assert(kSumPieceBytes % 6 == 0 && kSumStepBytes % 6 == 0 && kLaneBytes % 6 == 0, "phases must not change");
static_assert(6 * kLeadWords >= kVectorBytes - 1, "aligned memory may begin in front of a tensor");

struct LaneBytes {
  uint32_t words[kLaneBytes / 4];
};

struct LaneColumns {
  uint64_t low[4], high[4];  // of the lower and the upper halves of words
};

// The memory of a run, and the part that a lane reads: 48 bytes from `at` on, and those at further steps.
struct LaneRange {
  uint64_t at;          // aligned to vectors
  uint64_t begin, end;  // of the run: no other byte is read
  uint64_t place;       // of `at` in the tensor, plus the lead
};

VESCALE_CKPT_LANE bool is_inside(const LaneRange& range) {
  return range.at >= range.begin && range.at + kLaneBytes <= range.end;
}

VESCALE_CKPT_LANE LaneBytes load_inside(const LaneRange& range) {
  LaneBytes bytes{};
  if (!is_inside(range)) return bytes;
  VESCALE_CKPT_UNROLL
  for (uint32_t i = 0; i < kLaneBytes / kVectorBytes; ++i) {
    uint32_t* const words = bytes.words + kVectorWords * i;
#ifdef __CUDA_ARCH__
    const uint4 vector = __ldg(reinterpret_cast<const uint4*>(range.at) + i);
    words[0] = vector.x, words[1] = vector.y, words[2] = vector.z, words[3] = vector.w;
#else
    std::memcpy(words, reinterpret_cast<const void*>(range.at + kVectorBytes * i), kVectorBytes);
#endif
  }
  return bytes;
}

VESCALE_CKPT_LANE void add_product(uint32_t half, const Power& power, uint64_t* columns) {
  VESCALE_CKPT_UNROLL
  for (uint32_t limb = 0; limb < 4; ++limb) columns[limb] += uint64_t{half} * power.limbs[limb];
}

// Adds 48 bytes whose first one is byte kPhase of a word. What the phase leaves of halves is known to the compiler.
template <uint32_t kPhase>
VESCALE_CKPT_LANE void add_bytes(const LaneBytes& bytes, const Power* powers, LaneColumns& columns) {
  VESCALE_CKPT_UNROLL
  for (uint32_t half = kPhase / kHalfBytes; half * kHalfBytes < kPhase + kLaneBytes; ++half) {
    uint32_t number = 0;
    VESCALE_CKPT_UNROLL
    for (uint32_t i = 0; i < 2; ++i) {  // the words of memory that a half may touch
      const int32_t first = static_cast<int32_t>(half * kHalfBytes) - static_cast<int32_t>(kPhase);  // byte of `bytes`
      const int32_t word = (first + 4) / 4 - 1 + static_cast<int32_t>(i), shift = 8 * (4 * word - first);
      if (word < 0 || word >= static_cast<int32_t>(kLaneBytes / 4) || shift >= static_cast<int32_t>(kHalfBits))
        continue;
      number |= shift < 0 ? bytes.words[word] >> -shift : bytes.words[word] << shift;
    }
    add_product(number & ((1u << kHalfBits) - 1), powers[half / 2], half % 2 == 0 ? columns.low : columns.high);
  }
}

// Adds 48 bytes of which some are not of the run. This is rare: the first and the last of a run.
VESCALE_CKPT_LANE void add_edge(const LaneRange& range, uint32_t phase, const Power* powers, LaneColumns& columns) {
  const uint64_t begin = range.at < range.begin ? range.begin : range.at;
  const uint64_t end = range.end < range.at + kLaneBytes ? range.end : range.at + kLaneBytes;
  VESCALE_CKPT_NO_UNROLL
  for (uint64_t at = begin; at < end; ++at) {
    const uint32_t byte = static_cast<uint32_t>(at - range.at) + phase, half = byte / kHalfBytes;
    const uint32_t number = uint32_t{*reinterpret_cast<const uint8_t*>(at)} << (8 * (byte % kHalfBytes));
    if (half % 2 == 0) {
      add_product(number, powers[half / 2], columns.low);
    } else {
      add_product(number, powers[half / 2], columns.high);
    }
  }
}

template <uint32_t kPhase>
VESCALE_CKPT_LANE void add_steps(LaneRange range, const StepPowers& powers, LaneColumns& columns) {
  LaneBytes next = load_inside(range);
  VESCALE_CKPT_NO_UNROLL
  for (uint32_t step = 0; step < kLaneSteps && range.at < range.end; ++step) {
    const LaneRange now = range;
    const LaneBytes bytes = next;
    range.at += kSumStepBytes;
    if (step + 1 < kLaneSteps) next = load_inside(range);  // on its way while these are added
    if (is_inside(now)) {
      add_bytes<kPhase>(bytes, powers[step], columns);
    } else {
      add_edge(now, kPhase, powers[step], columns);
    }
  }
}

VESCALE_CKPT_LANE LaneColumns lane_columns(const LaneRange& range, const StepPowers& powers) {
  LaneColumns columns{};
  switch (range.place % 6) {
    case 0:
      add_steps<0>(range, powers, columns);
      break;
    case 1:
      add_steps<1>(range, powers, columns);
      break;
    case 2:
      add_steps<2>(range, powers, columns);
      break;
    case 3:
      add_steps<3>(range, powers, columns);
      break;
    case 4:
      add_steps<4>(range, powers, columns);
      break;
    default:
      add_steps<5>(range, powers, columns);
  }
  return columns;
}

// Returns the memory that a lane reads of a piece of a row.
VESCALE_CKPT_LANE LaneRange lane_range(const WordRow& row, const WordDim* dims, uint32_t piece, uint32_t lane) {
  uint64_t index = piece / row.run_pieces, begin = row.address, place = row.place;
  VESCALE_CKPT_NO_UNROLL
  for (uint32_t dim = row.dims_at + row.dims; dim-- > row.dims_at;) {
    const uint64_t outer = index / dims[dim].count, at = index - outer * dims[dim].count;
    begin += at * static_cast<uint64_t>(dims[dim].memory_stride);
    place += at * dims[dim].place_stride;
    index = outer;
  }
  const uint64_t head = begin % kVectorBytes;
  const uint64_t from = uint64_t{piece % row.run_pieces} * kSumPieceBytes + lane * kLaneBytes;
  return {begin - head + from, begin, begin + row.run, place + 6 * kLeadWords - head + from};
}

// Returns a lane's part of the sum of a row. `piece`: of the row. `steps`: those of `powers`, where they are read fast.
VESCALE_CKPT_LANE field::Value lane_sum(const WordRow& row, const WordDim* dims, uint32_t piece, uint32_t lane,
                                        const StepPowers& steps, const WordPowers& powers) {
  const LaneRange range = lane_range(row, dims, piece, lane);
  const LaneColumns columns = lane_columns(range, steps);
  field::Value sum = 0;
  VESCALE_CKPT_UNROLL
  for (uint32_t limb = 0; limb < 4; ++limb) {
    sum = field::sum(sum, field::shifted(columns.low[limb], 32 * limb));
    sum = field::sum(sum, field::shifted(columns.high[limb], 32 * limb + kHalfBits));
  }
  if (sum == 0) return sum;
  uint64_t word = range.place / 6;
  VESCALE_CKPT_NO_UNROLL
  for (uint32_t digit = 0; word != 0; word >>= 8, ++digit) {
    sum = field::product(sum, powers.digits[digit][word & 255]);
  }
  return sum;
}

// Returns the row of a piece of the table.
VESCALE_CKPT_LANE uint32_t row_of_piece(const WordRow* rows, uint32_t row_count, uint32_t piece) {
  uint32_t low = 0, high = row_count;  // the last row that begins at `piece` or before
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    if (rows[middle].first_piece <= piece) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace vescale_ckpt::device
