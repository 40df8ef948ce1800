// Plans what many nodes want alike: it travels along trees of nodes, and each node passes on what it got.
//
// The coordinator plans it once for all ranks, in one table that all ranks get; each rank makes its own rounds of that.
// Pieces of one set of ranks are put together in bundles. A bundle is read by one rank, and comes to each node once, to
// one of the ranks that want it, which take turns; the others look at it in that rank's memory. It travels within one
// round, along one of two trees of the set's nodes. What is in the middle of one tree is at an end of the other. So a
// node sends about as much as it gets, whoever reads, and exchanges messages with at most six others for each turn.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "share/route_pieces.h"

namespace vescale_ckpt::share {

// Takes the pieces out of `pieces` that many nodes want alike.
Pieces take_relayed(Pieces& pieces, AlikeOnNodes& alike);

// Adds a plan of these pieces of one group of ranks to `relays`. `bytes` as for plan_routes.
void plan_relays(Pieces pieces, const Needs& needs, std::span<const RankReads> ranks, std::span<const uint32_t> members,
                 const RouteOptions& options, std::span<uint64_t> bytes, std::vector<int64_t>& relays);

// The rounds of one rank. `reads`: the table of its reads that was planned. Throws Error (invalid) if `relays` is
// malformed, or made for other reads.
RankRoutes relay_routes(std::span<const int64_t> relays, uint32_t rank, std::span<const int64_t> reads);

}  // namespace vescale_ckpt::share
