// From what ranks need of stored records to pieces that are read once.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include "share/routes.h"

namespace vescale_ckpt::share {

// One row of a rank's reads.
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
struct Region {
  std::vector<int64_t> offset, size;

  static Region of(const Need& need);
  std::optional<Region> common(const Need& need) const;  // nullopt if nothing
  void cover(const Region& other);                       // the smallest that holds both
  // Takes in a neighbour if both together are a box.
  bool join(const Region& next);
  uint64_t elements() const;
  bool operator==(const Region&) const = default;
};

// A row of LoadPlan::reads for a part of what is needed.
void append_read(std::vector<int64_t>& reads, const Need& need, const Region& box);

struct Piece {
  struct Receiver {
    const Need* need;
    Region box;
  };

  const Need* like;  // one of those that need it: tells of the record
  Region box;        // what is read
  uint64_t bytes;
  std::vector<Receiver> receivers;  // by rank; several of a rank that wants it for several items
  uint32_t set;                     // of ranks that need it: number in Pieces::sets
  bool cuttable;
  bool wanted_whole;   // by all receivers
  uint64_t order = 0;  // in files; parts of one piece share it
  uint32_t reader = 0;

  // Parts it into one of at most `bytes` and the rest, which is returned; nullopt if both would not be needed by the
  // same ranks, or there is nothing to cut.
  std::optional<Piece> cut(uint64_t head_bytes);
};

struct Pieces {
  std::vector<Piece> pieces;
  std::vector<std::vector<uint32_t>> sets;  // rising ranks
};

// Cuts what is needed; what one alone needs is added to its `own` reads instead, and their bytes to `own_bytes`
// (by rank). `needs` holds all their needs, and must outlive the pieces. `senders` as below.
Pieces cut_pieces(std::span<const Need> needs, size_t senders, const RouteOptions& options,
                  std::span<RankRoutes> routes, std::span<uint64_t> own_bytes);

// Bytes that a rank reads of the record if it wants this box, joining ranges that lie close to each other; about.
uint64_t bytes_read_for(const Need& need, const Region& box, bool verify);

// The rows of `members`, in the order of files, checked. Throws Error (invalid, with the rank as item).
std::vector<Need> needs_of(std::span<const RankReads> ranks, std::span<const uint32_t> members);

// Of a piece, or of all that a reader has in a round. `senders`: whose messages a rank may get at a time.
uint64_t most_bytes_at_once(size_t senders, const RouteOptions& options);

}  // namespace vescale_ckpt::share
