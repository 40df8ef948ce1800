// Distributes chunks that several ranks hold over these ranks so that each writes about the same number of bytes.
// Chunks stay whole if that is even enough; otherwise they are split.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/numbered_strings.h"
#include "plan/layout.h"

namespace vescale_ckpt::plan {

// Keeps each set of ranks once: a mesh has few sets, however many chunks its ranks share.
class HolderSets {
 public:
  size_t size() const { return begins_.size() - 1; }
  std::span<const uint32_t> operator[](size_t set) const {
    return {ranks_.data() + begins_[set], begins_[set + 1] - begins_[set]};
  }
  uint64_t begin(size_t set) const { return begins_[set]; }  // index among the members of all sets
  size_t members() const { return ranks_.size(); }           // sum over all sets

  // Returns the number of the set of these ranks. Sets are numbered in the order of first appearance.
  uint32_t add(std::span<const Holder> holders) {
    new_ranks_.clear();
    for (const Holder& holder : holders) new_ranks_.push_back(holder.rank);
    const auto [set, is_new] =
        numbers_.add({reinterpret_cast<const char*>(new_ranks_.data()), new_ranks_.size() * sizeof(uint32_t)});
    if (is_new) {
      ranks_.insert(ranks_.end(), new_ranks_.begin(), new_ranks_.end());
      begins_.push_back(ranks_.size());
    }
    return set;
  }

 private:
  std::vector<uint32_t> ranks_;
  std::vector<uint64_t> begins_ = {0};
  NumberedStrings numbers_;          // numbers of the sets, by the bytes of their ranks
  std::vector<uint32_t> new_ranks_;  // the ranks of the present call of add
};

// The most even split of bytes over the ranks that could write them, treating bytes as divisible.
//
// Distributes bytes[set] over the ranks of each set, in the `order` of the sets, and adds what each rank gets to
// `loads`, which has one entry for each rank of the job. Returns the bytes that each member of each set got, set after
// set as in HolderSets. Sets that share ranks are distributed again, in turns, until a turn changes little: each turn
// lowers the sum of the squares of the loads, whose minimum is the most even split. The number of turns is bounded.
std::vector<int64_t> split_evenly(const HolderSets& sets, std::span<const uint32_t> order,
                                  std::span<const int64_t> bytes, std::span<int64_t> loads);

// `length` rows of a chunk from `start` on, and the rank that writes them.
struct Share {
  uint32_t rank;
  int64_t start, length;
};

// The shares that together are one chunk, in the order of its rows.
struct Shares {
  int32_t dim = -1;  // a row is one index of this dimension; -1: the chunk is one row of one share
  std::span<const Share> list;
};

struct SharedChunk {
  uint32_t set;                   // the ranks that hold it
  int64_t bytes;                  // more than 0
  std::span<const int64_t> size;  // it may be split along these dimensions; empty: it must stay whole
};

class Balance {
 public:
  // `loads`: bytes that each rank alone can write. `sets` must outlive this. Not thread-safe.
  Balance(const HolderSets& sets, std::vector<int64_t> loads, uint64_t least_piece_bytes);

  // Gives each chunk, the largest first, to the rank with the most room below the even level (split_evenly). If a
  // chunk would lift that rank above the level by more than 1/200 of the level, it is split over the remaining room of
  // the ranks of its set. Of equal chunks the first one comes first; of equal ranks the lowest. A chunk is split along
  // its first dimension longer than one, so that each piece is one run of memory. If the rows of that dimension are too
  // large for an even split, it is split along a later, longer dimension.
  void place(std::span<const SharedChunk> chunks);

  Shares shares(size_t chunk) const {
    return {places_[chunk].dim, {shares_.data() + places_[chunk].begin, places_[chunk].count}};
  }

 private:
  class MostRoom;
  struct Cut {
    int32_t dim;
    int64_t rows, row_bytes;
    int64_t least_rows;  // a piece has at least so many
  };
  struct Place {
    uint64_t begin;
    uint32_t count;
    int32_t dim;
  };

  void place_set(uint32_t set, int64_t bytes, std::span<const SharedChunk> chunks, std::span<const uint32_t> sorted);
  // Appends to shares_.
  int32_t split(const SharedChunk& chunk, std::span<const uint32_t> ranks, MostRoom& room, int64_t slack);
  static std::vector<Share> fill(const Cut& cut, std::span<const uint32_t> ranks, MostRoom& room, int64_t slack);
  Cut cut_along(const SharedChunk& chunk, int32_t dim) const;
  std::vector<Cut> cuts_of(const SharedChunk& chunk) const;

  const HolderSets& sets_;
  std::vector<int64_t> loads_;
  int64_t least_piece_bytes_;
  std::vector<Place> places_;
  std::vector<Share> shares_;
};

}  // namespace vescale_ckpt::plan
