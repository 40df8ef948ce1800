// Copies of boxes out of contiguous pieces in memory to wherever they belong, or the other way, many at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "io/box.h"

namespace vescale_ckpt::io {

struct BoxCopy {
  Box box;  // which elements of the piece, and how they lie in `memory`
  std::byte* piece;
  std::byte* memory;  // where the box's first element is
};

enum class CopyWay {
  scatter,  // out of the pieces
  gather,   // into them
};

// Makes all copies on up to `threads` threads. No two may write the same bytes, or read what another writes.
void copy_boxes(std::span<const BoxCopy> copies, unsigned threads, CopyWay way = CopyWay::scatter);

// Rows: dtype, address of the piece, dimensions n, n sizes of the piece, n offsets of the box in it, n sizes of the
// box, address of the box's first element, n strides (elements). Throws Error(invalid, row).
std::vector<BoxCopy> parse_copy_table(std::span<const int64_t> table);

}  // namespace vescale_ckpt::io
