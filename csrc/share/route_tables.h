// From a round's tables (routes.h) to the engine's, given the memory that their offsets are in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace vescale_ckpt::share {

// The engine's read table (read/table.h) for RouteRound::staged. Throws Error (invalid, row) for rows that leave the
// memory; what concerns the chunk is left to the engine to check. So do the others.
std::vector<int64_t> make_staging_table(std::span<const int64_t> staged, std::span<const std::byte> memory);

// The engine's copy table (io/box_copy.h) for RouteRound::packs.
std::vector<int64_t> make_pack_table(std::span<const int64_t> packs, std::span<const std::byte> memory);

}  // namespace vescale_ckpt::share
