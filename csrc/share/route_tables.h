// Translates a round's tables (routes.h) into the engine's: offsets become addresses in the rank's memory of the round.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace vescale_ckpt::share {

// The engine's read table (read/read_table.h) for RouteRound::staged. Throws Error (invalid, row) for rows that leave
// the memory; the engine checks what concerns the chunk.
std::vector<int64_t> make_staging_table(std::span<const int64_t> staged, std::span<const std::byte> memory);

// The engine's copy table (io/box_copy.h) for RouteRound::packs. Throws Error (invalid, row) in the same way.
std::vector<int64_t> make_pack_table(std::span<const int64_t> packs, std::span<const std::byte> memory);

}  // namespace vescale_ckpt::share
