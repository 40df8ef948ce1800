// Chooses which of the ranks that need a piece reads it.
#pragma once

#include <cstdint>
#include <span>

#include "share/route_pieces.h"

namespace vescale_ckpt::share {

// Sets the reader of each piece. All ranks read about the same number of bytes, each in long stretches of a file.
// `bytes` has one entry a rank: bytes that it reads in any case; those of its pieces are added. May cut pieces. Sorts
// them by set and by their position in the files.
void choose_readers(Pieces& pieces, std::span<uint64_t> bytes);

}  // namespace vescale_ckpt::share
