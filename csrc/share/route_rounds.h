// When each piece is read and sent, and where it lies meanwhile.
#pragma once

#include <cstdint>
#include <span>

#include "share/route_pieces.h"

namespace vescale_ckpt::share {

// Adds rounds to the routes of `members`, in which all pieces are read and delivered. `senders` as for
// most_bytes_at_once.
void make_rounds(const Pieces& pieces, std::span<const RankReads> ranks, std::span<const uint32_t> members,
                 size_t senders, const RouteOptions& options, std::span<RankRoutes> routes);

}  // namespace vescale_ckpt::share
