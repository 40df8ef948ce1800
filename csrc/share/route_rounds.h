// Schedules pieces in rounds, and lays out the memory that each rank has in a round.
#pragma once

#include <cstdint>
#include <span>

#include "share/route_pieces.h"

namespace vescale_ckpt::share {

// Adds rounds to the routes of the ranks `members`, in which all pieces are read and delivered. `senders` as for
// most_bytes_at_once.
void make_rounds(const Pieces& pieces, std::span<const RankReads> ranks, std::span<const uint32_t> members,
                 size_t senders, const RouteOptions& options, std::span<RankRoutes> routes);

}  // namespace vescale_ckpt::share
