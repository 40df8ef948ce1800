// Cuts what ranks need of stored records into pieces that are read once, for a load with shared reads.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include "share/routes.h"

namespace vescale_ckpt::share {

// One row of a rank's reads (metadata/load_plan.h), with its rank and the number of its file over all ranks. A view.
struct Need {
  static constexpr size_t kHead = 7;

  uint32_t rank = 0;
  uint32_t file = 0;  // numbered over all ranks
  std::span<const int64_t> row;

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

uint64_t item_bytes(const Need& need);

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

  // Keeps at most `head_bytes` and returns the rest. Returns nullopt, and keeps all, if it cannot be cut so.
  std::optional<Piece> cut(uint64_t head_bytes);

 private:
  void narrow(size_t dim, int64_t begin, int64_t end);  // to these indices of the chunk
};

struct Pieces {
  std::vector<Piece> pieces;
  std::vector<std::vector<uint32_t>> sets;  // rising ranks
};

// Cuts what two or more ranks need into pieces. What only one rank needs is added to its `own` reads in `routes`, and
// its bytes to `own_bytes`, which has one entry a rank. `needs` holds all their needs, and must outlive the pieces.
// `senders` as for most_bytes_at_once. `writers`: of each file the rank that gets all of it, if that is known: then its
// own are the pieces that only it has, and it is the reader of all others.
Pieces cut_pieces(std::span<const Need> needs, size_t senders, const RouteOptions& options,
                  std::span<const uint32_t> writers, std::span<RankRoutes> routes, std::span<uint64_t> own_bytes);

// Estimates the bytes that a rank reads of the record to get this box. Ranges that lie close together are read as one.
uint64_t bytes_read_for(const Need& need, const Box& box, bool verify);

// The rows of `members`, in the order of files, checked. `numbered`: their files have the same numbers on all ranks,
// and no names. Throws Error (invalid, with the rank as item).
std::vector<Need> needs_of(std::span<const RankReads> ranks, std::span<const uint32_t> members, bool numbered = false);

// The most bytes of one piece, and of all pieces that one rank reads in one round. `senders`: how many ranks may send
// to one rank in a round.
uint64_t most_bytes_at_once(size_t senders, const RouteOptions& options);

}  // namespace vescale_ckpt::share
