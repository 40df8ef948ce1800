// Shares out what several ranks hold, in whole boxes where that is even enough, else in pieces.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "plan/holder_sets.h"

namespace vescale_ckpt {

// `length` rows of a box from `start` on, and the rank that writes them. A whole box has start 0 and all its rows.
struct Share {
  uint32_t rank;
  int64_t start, length;
};

struct Contested {
  uint32_t set;   // the ranks that hold it
  int64_t bytes;  // more than 0
  int64_t rows;   // it may be split between these; 1 if it cannot be
  // Its shares in the plan before, in the order of their rows, if all of their ranks are still in the set.
  std::span<const Share> previous;
};

class Balance {
 public:
  // `loads`: bytes that each rank writes anyway.
  Balance(const HolderSets& sets, std::vector<int64_t> loads, uint64_t least_piece_bytes);

  // Largest first: a box stays with the rank that had it, else goes to the one with the most room. What would lift any
  // rank above the even level by more than 1/200 of it is split over the gaps that the others leave. Ties go to the box
  // that comes first and to the lowest rank.
  void place(std::span<const Contested> boxes);

  // Of that box, in the order of their rows; one if it is whole.
  std::span<const Share> shares(size_t box) const { return {shares_.data() + places_[box].begin, places_[box].count}; }

 private:
  class MostRoom;
  struct Place {
    uint64_t begin;
    uint64_t count;
  };

  void place_set(uint32_t set, int64_t bytes, std::span<const Contested> boxes, std::span<const uint32_t> sorted);
  bool keep(const Contested& box, std::span<const uint32_t> ranks, MostRoom& room, int64_t slack);
  void split(const Contested& box, std::span<const uint32_t> ranks, MostRoom& room, int64_t slack);
  int64_t least_rows(const Contested& box) const;

  const HolderSets& sets_;
  std::vector<int64_t> loads_;
  int64_t least_piece_bytes_;
  std::vector<Place> places_;
  std::vector<Share> shares_;
};

}  // namespace vescale_ckpt
