// Plans shared reads and writes. In a load, bytes that several ranks need are read by one of them and sent to the
// others. In an export, bytes of one file that several ranks hold are sent to one of them, which writes them.
//
// A load with shared reads: each piece of a record is read by one of the ranks that need it and delivered to the
// others, in rounds that all ranks run together. In a round each rank has one contiguous buffer: it reads pieces into
// it, packs boxes of them into messages there, and receives messages there. Each byte is sent to a node at most once:
// the message goes to one of its ranks, in turn, and the other ranks of the node read it in that rank's shared buffer.
// From the buffers, boxes are copied to the targets. Bytes that only one rank needs are read by it directly into its
// targets.
//
// All ranks that need a piece are candidate readers, and read about the same number of bytes, so a node sends about as
// much as it receives. A reader sends to every node that needs its piece. To bound the fan-out, a piece that more than
// 16 nodes need is read once for each group of 16, and nodes with equal needs are planned once for each group of 16.
//
// An export runs the same plan in reverse: pieces are written from the buffer, the ranks of a node copy their boxes
// into each other's buffers, and a node sends its share of a piece in one message.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace vescale_ckpt::share {

struct RouteOptions {
  uint64_t piece_bytes = 16 << 20;    // upper bound of a piece
  uint64_t budget_bytes = 128 << 20;  // upper bound of a rank's buffer, unless one piece is larger
  // Records without block checksums (CRC-32 -1) can only be verified as a whole. With `verify`, such a record is one
  // piece if the bounding box of all needs has at most `whole_bytes`; otherwise each rank reads it for itself.
  bool verify = true;
  uint64_t whole_bytes = 64 << 20;
  uint32_t most_nodes = 16;     // the most nodes that share one read
  bool sees_neighbours = true;  // whether ranks of a node share memory
  bool writes = false;          // pieces are contiguous in the buffer as in their file; set by plan_writes
};

// The reads of a rank without sharing: LoadPlan::reads and LoadPlan::files. Replicas share both: equal ones at other
// addresses are planned one by one. For an export, the boxes that it holds, in rows of the same form: item, file number
// (equal on all ranks), offset and length of the tensor in the file.
struct RankReads {
  std::span<const int64_t> reads;
  std::span<const std::string> files;
  uint32_t group = 0;  // nothing is sent between groups
  uint32_t node = 0;
};

// One rank's part of a round, as tables of rows of 64-bit integers. Offsets are bytes in the rank's buffer, which must
// be page-aligned; pieces and parts of messages are contiguous in it.
struct RouteRound {
  // Pieces to read. Rows: offset, item that needs it, file, record offset, record length, crc, dtype, dimensions n, n
  // sizes of the chunk, n offsets in it, n sizes of the piece.
  std::vector<int64_t> staged;
  // Copies into messages. Rows: from offset, to offset, dtype, dimensions n, n sizes of the piece, n offsets in it, n
  // sizes.
  std::vector<int64_t> packs;
  // Messages. Rows: peer, offset, bytes; at most one per peer. Rows with bytes are exchanged first. A row with 0 bytes,
  // from a peer on the same node, then signals that the pieces and messages in the peer's buffer are complete.
  std::vector<int64_t> sends, receives;
  // Copies to the targets. Rows: peer whose buffer is read (-1: this rank), from offset, item, dtype, dimensions n,
  // n sizes of the piece or message part there, n offsets in it, n sizes, n offsets in the item's box.
  std::vector<int64_t> places;
  uint64_t memory_bytes = 0;
};

struct RankRoutes {
  std::vector<int64_t> own;        // rows of LoadPlan::reads
  std::vector<RouteRound> rounds;  // equally many on all ranks
  uint64_t shared_bytes = 0;       // bytes that the rank obtains in the rounds
  // Totals over all ranks: bytes read in the rounds, and an estimate of the bytes read without sharing.
  uint64_t once_bytes = 0, alone_bytes = 0;
};

// Ranks whose routes equal those of `like`, in the same order, with the numbers of `ranks` substituted.
struct Renumbered {
  std::vector<uint32_t> ranks, like;
};

// Returns the routes of each rank, deterministically; those of ranks in `renumbered` are left empty. `bytes`: for each
// rank, the bytes that earlier plans assign to it. Adds those of this plan, which balances the sums.
// Throws Error (invalid, with the rank as item) if ranks disagree about a record, or reads are malformed.
std::vector<RankRoutes> plan_routes(std::span<const RankReads> ranks, const RouteOptions& options,
                                    std::span<uint64_t> bytes, std::vector<Renumbered>& renumbered);

// Plans the routes of an export. `held`: disjoint boxes, which within a group cover their tensors; a group is a node.
// Each piece is written by one of the ranks that hold a part of it, in long runs. Boxes that only their writer holds
// are in `own`. In the rounds, tables run in reverse: `staged` lists bytes to write, `places` gather from tensors.
// `bytes`: for each rank, the bytes that it writes outside these routes. Adds those of the routes, which balances the
// sums. Throws Error (invalid) for malformed rows, with the rank as item, and for too many pieces.
std::vector<RankRoutes> plan_writes(std::span<const RankReads> held, const RouteOptions& options,
                                    std::span<uint64_t> bytes);

// Splits `reads` into `parts` tables, so that large plans are made in bounded memory. Rows of a record are in the same
// part on all ranks: files are divided into ranges of `range_bytes`, and ranges are assigned to parts round-robin.
// Throws Error (invalid) for malformed reads.
std::vector<std::vector<int64_t>> split_reads(std::span<const int64_t> reads, std::span<const std::string> files,
                                              uint32_t parts, uint64_t range_bytes);

// Estimates the bytes that a rank reads for `reads` without sharing. Ranges that lie close together are read as one.
// Throws Error (invalid).
uint64_t bytes_read_alone(const RankReads& reads, bool verify);

// Serializes routes: number of rounds, shared_bytes, once_bytes, alone_bytes, length of `own`, `own`; then for each
// round memory_bytes, the lengths of staged, packs, sends, receives and places, and these tables.
std::vector<int64_t> pack_routes(const RankRoutes& routes);

}  // namespace vescale_ckpt::share
