// Which of the ranks that need a piece reads it.
#pragma once

#include <cstdint>
#include <span>

#include "share/route_pieces.h"

namespace vescale_ckpt::share {

// Sets the reader of each piece, so that all ranks read about as many bytes, counting those they have to read in any
// case (`bytes`, by rank; updated), and each in long stretches. May cut pieces for that; orders them by set and place.
void choose_readers(Pieces& pieces, std::span<uint64_t> bytes);

}  // namespace vescale_ckpt::share
