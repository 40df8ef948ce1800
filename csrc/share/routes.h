// Plans which rank reads for which others, or writes for them: bytes that several ranks need are read by one of them
// and sent to the others, and bytes that several ranks hold of one file are sent to one of them and written by it.
//
// A load with shared reads:
// Pieces of records are each read by one of the ranks that need them and delivered to the others, in rounds that all
// ranks take together. In a round a rank has one contiguous memory: pieces are read into it, boxes of them are packed
// into messages there, and messages of other ranks arrive there. A node gets each byte once: a message goes to one of
// its ranks, which take turns, and the ranks of a node read in each other's memories what was read or has arrived
// there. From there all is copied to the targets. What only one rank needs, it reads itself, straight to its targets.
//
// All ranks that need a piece may be its readers and read equally much, so a node sends about as much as it gets. A
// reader sends to every node that needs its piece. So that these are few, what more than 16 nodes need is read once for
// each 16 of them, and nodes whose ranks need the same are planned once for each 16 of them.
//
// An export is the same with all arrows turned: what is read in a load is written from the same memory, the ranks of a
// node copy their boxes into each other's memory, and a node sends what its ranks hold of a piece in one message.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace vescale_ckpt::share {

struct RouteOptions {
  uint64_t piece_bytes = 16 << 20;    // the most bytes of one piece
  uint64_t budget_bytes = 128 << 20;  // memory of a rank in a round, unless one piece takes more
  // Records without checksums of their parts (CRC-32 -1) can only be checked as a whole. With `verify`, such a
  // record is one piece if the box that holds all that is needed of it has at most `whole_bytes`; else each rank reads
  // it for itself.
  bool verify = true;
  uint64_t whole_bytes = 64 << 20;
  uint32_t most_nodes = 16;     // what more need is read once for each so many of them
  bool sees_neighbours = true;  // whether ranks of one node see each other's memory
  bool writes = false;          // pieces lie in memory as in their file, one behind another; plan_writes sets it
};

// What a rank reads without sharing: LoadPlan::reads and LoadPlan::files. For an export, what it holds: rows of the
// same form, of its item, the file's number, which is the same on all ranks, and offset and length of the tensor in the
// file.
struct RankReads {
  std::span<const int64_t> reads;
  std::span<const std::string> files;
  uint32_t group = 0;  // ranks of different groups deliver each other nothing
  uint32_t node = 0;
};

// What a rank does in one round, in tables of rows of 64-bit integers. Offsets are bytes in a rank's memory of the
// round, which has to start at a page; pieces and parts of messages lie in it contiguously.
struct RouteRound {
  // To read. Rows: offset, item that wants it, file, record offset, record length, crc, dtype, dimensions n, n sizes of
  // the chunk, n offsets in it, n sizes of the piece.
  std::vector<int64_t> staged;
  // Into messages. Rows: from offset, to offset, dtype, dimensions n, n sizes of the piece, n offsets in it, n sizes.
  std::vector<int64_t> packs;
  // Rows: peer, offset, bytes; at most one of a peer. Those with bytes come first in time. A row with 0 bytes, of a
  // peer of the same node, then says that the peer's memory can be read: pieces, and messages that it got.
  std::vector<int64_t> sends, receives;
  // Copies to the targets. Rows: peer in whose memory it lies (-1: this rank's), from offset, item, dtype, dimensions
  // n, n sizes of what lies there, n offsets in it, n sizes, n offsets in the item's box.
  std::vector<int64_t> places;
  uint64_t memory_bytes = 0;
};

struct RankRoutes {
  std::vector<int64_t> own;        // rows of LoadPlan::reads
  std::vector<RouteRound> rounds;  // equally many on all ranks
  uint64_t shared_bytes = 0;       // bytes that the rank gets in the rounds
  // The same for all ranks: bytes that are read in the rounds, and an estimate of what all ranks would read
  // without sharing.
  uint64_t once_bytes = 0, alone_bytes = 0;
};

// Ranks whose routes are those of as many others, in the same order, with their own numbers in place of those ranks'.
struct Renumbered {
  std::vector<uint32_t> ranks, like;
};

// One for each rank, the same on every run; those of ranks in `renumbered` are not filled in. `bytes` has one entry a
// rank, the bytes that it reads by plans before this one; those of this plan are added, and all together are even.
// Throws Error (invalid, with the rank as item) if ranks disagree about a record, or reads are malformed.
std::vector<RankRoutes> plan_routes(std::span<const RankReads> ranks, const RouteOptions& options,
                                    std::span<uint64_t> bytes, std::vector<Renumbered>& renumbered);

// The routes of an export. `held`: boxes that do not overlap and cover their tensors, as far as ranks of one group hold
// them. `writers`: of each file the rank that writes all of it, in order; empty: each piece is written by one of the
// ranks that hold a part of it, in long stretches. What its writer holds alone is in `own`. In the rounds tables mean
// the opposite: `staged` is written, `packs` are taken out of messages, `places` are copied to the memory that they are
// in. `bytes` has one entry a rank, the bytes that it writes beside these routes; those of the routes are added, and
// all together are even if `writers` is empty. Throws Error (invalid): malformed rows, with the rank as item, or too
// many pieces.
std::vector<RankRoutes> plan_writes(std::span<const RankReads> held, std::span<const uint32_t> writers,
                                    const RouteOptions& options, std::span<uint64_t> bytes);

// Where the last record starts, in bytes of its file; 0 if there is none. Throws Error (invalid) for malformed reads.
int64_t last_record(std::span<const int64_t> reads);

// The rows of `reads` in `parts` tables, so that a plan for many ranks and tensors is made part by part in bounded
// memory. Rows of one record are in the same part on all ranks:
// files are cut into ranges of `range_bytes`, by where records start, and ranges are dealt out in turn. Throws
// Error (invalid) for malformed reads.
std::vector<std::vector<int64_t>> split_reads(std::span<const int64_t> reads, std::span<const std::string> files,
                                              uint32_t parts, uint64_t range_bytes);

// Estimates the bytes that a rank reads for `reads` without sharing. Ranges that lie close together are read as one.
// Throws Error (invalid).
uint64_t bytes_read_alone(const RankReads& reads, bool verify);

// The routes as one array for a message: numbers of rounds, of shared, once and alone bytes, and of words of `own`;
// these; then of each round its memory_bytes, the numbers of words of staged, packs, sends, receives and places, and
// these.
std::vector<int64_t> pack_routes(const RankRoutes& routes);

}  // namespace vescale_ckpt::share
