// Cuts the needs of ranks into pieces, each of which is read once, and schedules the pieces in rounds
// (route_rounds.cpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <vector>

#include "share/routes.h"

namespace vescale_ckpt::share {

// --- Needs (route_needs.cpp)

// Ranks that share one table of reads: replicas. They are planned once.
struct Replicas {
  std::vector<uint32_t> ranks;  // ascending
};

// A view of one row of a rank's reads (metadata/load_plan.h).
struct Need {
  static constexpr size_t kHead = 7;

  uint32_t rank = 0;  // the lowest of its replicas; after expand_replicas each of them
  uint32_t file = 0;  // number of the file, equal on all ranks
  std::span<const int64_t> row;
  const Replicas* replicas = nullptr;

  int64_t item() const { return row[0]; }
  int64_t record_offset() const { return row[2]; }
  int64_t record_length() const { return row[3]; }
  int64_t crc() const { return row[4]; }
  int64_t dtype() const { return row[5]; }
  size_t dims() const { return static_cast<size_t>(row[6]); }
  std::span<const int64_t> chunk() const { return list(0); }
  std::span<const int64_t> box_offset() const { return list(1); }
  std::span<const int64_t> box_size() const { return list(2); }
  std::span<const int64_t> target() const { return list(3); }

 private:
  std::span<const int64_t> list(size_t number) const { return row.subspan(kHead + number * dims(), dims()); }
};

// Needs of several ranks, ordered by file and offset, those of replicas once.
struct Needs {
  std::vector<Replicas> replicas;
  std::vector<Need> rows;
};

uint64_t item_bytes(const Need& need);

// Groups the ranks `members` by their tables, ordered by the lowest rank of each group.
std::vector<Replicas> replicas_among(std::span<const RankReads> ranks, std::span<const uint32_t> members);

// Returns the validated rows of `members`. `numbered`: files have no names, and equal numbers on all ranks. Throws
// Error (invalid, with the rank as item).
Needs needs_of(std::span<const RankReads> ranks, std::span<const uint32_t> members, bool numbered = false);

// --- Pieces (route_pieces.cpp)

// A box of a chunk.
struct Box {
  std::vector<int64_t> offset, size;

  static Box of(const Need& need);
  std::optional<Box> common(const Need& need) const;  // the intersection; nullopt if empty
  void cover(const Box& other);                       // becomes the bounding box of both
  // Merges an adjacent box if the union is a box.
  bool join(const Box& next);
  uint64_t elements() const;
  bool operator==(const Box&) const = default;
};

// Appends a row of LoadPlan::reads for a box of the need.
void append_read(std::vector<int64_t>& reads, const Need& need, const Box& box);

struct Piece {
  struct Receiver {
    const Need* need;
    Box box;
  };

  const Need* like;  // any of its needs, for the traits of the record
  Box box;           // to read
  uint64_t bytes;
  std::vector<Receiver> receivers;  // by rank, which may occur several times, for several items
  uint32_t set;                     // index in Pieces::sets of the ranks that need it
  uint32_t reader = 0;

  // Sets the receivers, ordered by rank, and the box that covers their boxes.
  void receive(std::vector<Receiver> by_rank);
};

// A box of a piece that is sent to a node once, and its receivers there.
struct Parcel {
  Box box;
  std::vector<const Piece::Receiver*> receivers;
};

// The boxes of a piece for one node.
using Parcels = std::vector<Parcel>;

// Adds `next`. Merges it repeatedly with parcels whose bounding box with it is no larger than the two together: one
// contains the other, they overlap along one dimension, or they are adjacent.
void join(Parcels& parcels, Parcel next);

struct Pieces {
  std::vector<Piece> pieces;
  std::vector<std::vector<uint32_t>> sets;  // ascending ranks; the lowest of replicas
};

// Cuts the needs of two or more ranks into pieces. Needs of one rank alone are appended to its `own` reads in `routes`,
// and their bytes added to its entry of `own_bytes`. `needs` must be complete, and outlive the pieces. `senders` as for
// max_piece_bytes.
Pieces cut_pieces(std::span<const Need> needs, size_t senders, const RouteOptions& options,
                  std::span<RankRoutes> routes, std::span<uint64_t> own_bytes);

// Makes each replica a receiver, and extends the sets to all ranks. The returned needs must outlive the pieces.
std::deque<Need> expand_replicas(Pieces& pieces);

// Replaces each piece that more than `most_nodes` nodes need by several equal ones, each for about as many nodes as
// the others.
void split_among_nodes(Pieces& pieces, std::span<const RankReads> ranks, size_t most_nodes);

// Estimates the bytes that a rank reads to obtain this box; ranges with small gaps are read as one.
uint64_t bytes_read_for(const Need& need, const Box& box, bool verify);

// Returns the buffer offset >= `cursor` of a box. For large boxes it is congruent to the file offset modulo the page
// size, so that direct I/O needs no copy. `in_file`: the record's offset is that of its first element, and bytes that
// are contiguous in the file are so in the buffer.
uint64_t staging_offset(const Need& need, const Box& box, bool in_file, uint64_t cursor);

// Append a row to RouteRound::staged and RouteRound::places. `lies`: the box that is contiguous at the offset.
void append_staged(std::vector<int64_t>& staged, const Need& need, const Box& box, uint64_t offset);
void append_place(std::vector<int64_t>& places, int64_t peer, uint64_t offset, const Piece::Receiver& to,
                  const Box& lies);

// The most bytes of one piece, and of all pieces that a rank reads in a round. `senders`: the most ranks that send to
// one rank in a round.
uint64_t max_piece_bytes(size_t senders, const RouteOptions& options);

// --- Rounds (route_rounds.cpp)

// Appends rounds that read and deliver all pieces to the routes of the ranks `members`. `senders` as for
// max_piece_bytes.
void make_rounds(const Pieces& pieces, std::span<const RankReads> ranks, std::span<const uint32_t> members,
                 size_t senders, const RouteOptions& options, std::span<RankRoutes> routes);

}  // namespace vescale_ckpt::share
