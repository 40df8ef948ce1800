// Cuts what ranks need of stored records into pieces that are read once, for a load with shared reads, and schedules
// them in rounds (route_rounds.cpp).
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <vector>

#include "share/route_needs.h"
#include "share/routes.h"

namespace vescale_ckpt::share {

// A box of a chunk.
struct Box {
  std::vector<int64_t> offset, size;

  static Box of(const Need& need);
  std::optional<Box> common(const Need& need) const;  // nullopt if nothing
  void cover(const Box& other);                       // becomes the smallest box that holds both
  // Takes in a neighbour if both together are a box.
  bool join(const Box& next);
  uint64_t elements() const;
  bool operator==(const Box&) const = default;
};

// A row of LoadPlan::reads for a part of what is needed.
void append_read(std::vector<int64_t>& reads, const Need& need, const Box& box);

struct Piece {
  struct Receiver {
    const Need* need;
    Box box;
  };

  const Need* like;  // one of those that need it: tells of the record
  Box box;           // what is read
  uint64_t bytes;
  std::vector<Receiver> receivers;  // by rank; several of a rank that wants it for several items
  uint32_t set;                     // ranks that need it: index in Pieces::sets
  enum class Cuts { never, if_all_receive_both, always } cuts;
  uint64_t order = 0;  // position in the files; pieces cut from one piece have the same
  uint32_t reader = 0;

  // Becomes what these receivers, by rank, need of a record.
  void receive(std::vector<Receiver> by_rank);
  // Keeps at most `head_bytes` and returns the rest. Returns nullopt, and keeps all, if it cannot be cut so.
  std::optional<Piece> cut(uint64_t head_bytes);

 private:
  void narrow(size_t dim, int64_t begin, int64_t end);  // to these indices of the chunk
};

// A box of a piece that goes to a node once, and who there wants it or a part of it.
struct Parcel {
  Box box;
  std::vector<const Piece::Receiver*> receivers;
};

// What the ranks of one node want of a piece.
using Parcels = std::vector<Parcel>;

// Takes `next` into a box of the list where both together are no more bytes than each for itself: where one holds the
// other, where they overlap along one dimension, where they are neighbours. Goes on while boxes come together.
void join(Parcels& parcels, Parcel next);

struct Pieces {
  std::vector<Piece> pieces;
  std::vector<std::vector<uint32_t>> sets;  // rising ranks, of replicas the lowest
};

// Cuts what two or more ranks need into pieces. What only one rank needs is added to its `own` reads in `routes`, and
// its bytes to `own_bytes`, which has one entry a rank. `needs` holds all their needs, and must outlive the pieces.
// `senders` as for most_bytes_at_once. `writers`: of each file the rank that gets all of it, if that is known: then its
// own are the pieces that only it has, and it is the reader of all others.
Pieces cut_pieces(std::span<const Need> needs, size_t senders, const RouteOptions& options,
                  std::span<const uint32_t> writers, std::span<RankRoutes> routes, std::span<uint64_t> own_bytes);

// Makes each replica a receiver of its own, and sets of all their ranks. The needs it made must outlive the pieces.
std::deque<Need> each_for_itself(Pieces& pieces);

// Makes several of each piece that ranks of more than `most_nodes` nodes need, for at most so many nodes each, which
// are evenly many.
void split_among_nodes(Pieces& pieces, std::span<const RankReads> ranks, size_t most_nodes);

// Estimates the bytes that a rank reads of the record to get this box. Ranges that lie close together are read as one.
uint64_t bytes_read_for(const Need& need, const Box& box, bool verify);

// Where in a rank's memory of a round, from `cursor` on, a box of a record is read to: bytes at the same place within a
// page as in the file go there, or come from there, without a copy. `in_file`: the record's offset is that of its first
// element, and what is one behind another in the file is so in memory.
uint64_t staging_offset(const Need& need, const Box& box, bool in_file, uint64_t cursor);

// Adds a row to RouteRound::staged, and to RouteRound::places. `lies`: the box that lies contiguously at the offset.
void append_staged(std::vector<int64_t>& staged, const Need& need, const Box& box, uint64_t offset);
void append_place(std::vector<int64_t>& places, int64_t peer, uint64_t offset, const Piece::Receiver& to,
                  const Box& lies);

// The most bytes of one piece, and of all pieces that one rank reads in one round. `senders`: how many ranks may send
// to one rank in a round.
uint64_t most_bytes_at_once(size_t senders, const RouteOptions& options);

// Adds rounds to the routes of the ranks `members`, in which all pieces are read and delivered. `senders` as for
// most_bytes_at_once.
void make_rounds(const Pieces& pieces, std::span<const RankReads> ranks, std::span<const uint32_t> members,
                 size_t senders, const RouteOptions& options, std::span<RankRoutes> routes);

}  // namespace vescale_ckpt::share
