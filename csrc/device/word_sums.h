// Does the work of one lane of the kernel that adds up words. kernels.cu compiles it for the device, and the tests
// compile it for the host, where they compare it with the fingerprints of the host's own code.
#pragma once

#include <cstdint>

#include "base/field.h"
#include "device/pack_rows.h"
#include "device/word_table.h"

#ifdef __CUDACC__
#define VESCALE_CKPT_UNROLL_4 _Pragma("unroll 4")  // so that loads of several steps are on their way at once
#else
#define VESCALE_CKPT_UNROLL_4
#endif

namespace vescale_ckpt::device {

// Returns the word that begins `shift` bits behind three units of memory.
VESCALE_CKPT_LANE uint64_t word_in(const uint32_t* units, uint32_t shift) {
  const uint64_t low = units[0] | (uint64_t{units[1]} << 32), high = units[1] | (uint64_t{units[2]} << 32);
  return static_cast<uint32_t>(low >> shift) | (uint64_t{static_cast<uint16_t>(high >> shift)} << 32);
}

// Returns the word at an address, of which only the bytes in [begin, end) are read; others count as 0.
VESCALE_CKPT_LANE uint64_t edge_at(uint64_t at, uint64_t begin, uint64_t end) {
  uint64_t word = 0;
  VESCALE_CKPT_NO_UNROLL
  for (uint32_t byte = 0; byte < kSumWordBytes; ++byte) {
    if (at + byte < begin || at + byte >= end) continue;
    word |= uint64_t{*reinterpret_cast<const uint8_t*>(at + byte)} << (8 * byte);
  }
  return word;
}

// Returns a value times the point to the power of a word's number.
VESCALE_CKPT_LANE field::Value times_power(field::Value value, uint64_t word, const WordPowers& powers) {
  VESCALE_CKPT_NO_UNROLL
  for (uint32_t digit = 0; word != 0; word >>= 8, ++digit) {
    value = field::product(value, powers.digits[digit][word & 255]);
  }
  return value;
}

// Returns a lane's part of the sum of a row. `piece`: of the row.
VESCALE_CKPT_LANE field::Value lane_sum(const WordRow& row, uint32_t piece, uint32_t lane, const WordPowers& powers) {
  const uint64_t run = piece / row.run_pieces, place = row.place + run * row.place_stride;
  const uint64_t begin = row.address + run * static_cast<uint64_t>(row.memory_stride), end = begin + row.run;
  const uint64_t word = place / kSumWordBytes + uint64_t{piece % row.run_pieces} * kSumPieceWords + lane;
  const uint64_t at = begin + (kSumWordBytes * word - place);  // of the lane's first word; it may begin before the run
  if (at >= end) return 0;
  const uint64_t whole = (end - 1 - at) / kSumStepBytes;
  const auto last = static_cast<uint32_t>(whole < kSumSteps ? whole : kSumSteps - 1);  // step with bytes of the run

  field::Value low = 0, high = 0;  // the products of 48 and 64 bits add up to less than 2^120
  const auto add = [&](uint64_t number, field::Value power) {
    low += field::Value{number} * static_cast<uint64_t>(power);
    high += field::Value{number} * static_cast<uint64_t>(power >> 64);
  };
  add(edge_at(at, begin, end), powers.steps[0]);
  const auto* const units = reinterpret_cast<const uint32_t*>(at & ~uint64_t{3});
  const auto shift = static_cast<uint32_t>(8 * (at & 3));
  VESCALE_CKPT_UNROLL_4
  for (uint32_t step = 1; step < last; ++step) {  // words and units that are all in the run
    add(word_in(units + step * (kSumStepBytes / 4), shift), powers.steps[step]);
  }
  if (last != 0) add(edge_at(at + last * kSumStepBytes, begin, end), powers.steps[last]);

  const field::Value sum = field::sum(field::reduced(low), field::shifted(field::reduced(high), 64));
  return times_power(sum, word, powers);
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
