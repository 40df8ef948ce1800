#include "plan/balance.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "plan/water.h"

namespace vescale_ckpt {
namespace {

constexpr int64_t kSlack = 200;  // whole boxes may rise above the level by this part of it

size_t member_of(std::span<const uint32_t> ranks, uint32_t rank) {
  return static_cast<size_t>(std::lower_bound(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

}  // namespace

// The room of each member of a set, and who has the most.
class Balance::MostRoom {
 public:
  explicit MostRoom(std::vector<int64_t> room) : room_(std::move(room)) {
    heap_.reserve(room_.size() * 2);
    for (size_t member = 0; member < room_.size(); ++member) heap_.push_back(entry(member));
    std::make_heap(heap_.begin(), heap_.end());
  }

  int64_t operator[](size_t member) const { return room_[member]; }

  size_t most() {
    for (;;) {
      const auto member = static_cast<size_t>(-heap_.front().second);
      if (heap_.front().first == room_[member]) return member;
      std::pop_heap(heap_.begin(), heap_.end());  // its room has changed since
      heap_.pop_back();
    }
  }

  void take(size_t member, int64_t bytes) {
    room_[member] -= bytes;
    heap_.push_back(entry(member));
    std::push_heap(heap_.begin(), heap_.end());
  }

 private:
  // The lowest member is on top among equals.
  std::pair<int64_t, int64_t> entry(size_t member) const { return {room_[member], -static_cast<int64_t>(member)}; }

  std::vector<int64_t> room_;
  std::vector<std::pair<int64_t, int64_t>> heap_;
};

Balance::Balance(const HolderSets& sets, std::vector<int64_t> loads, uint64_t least_piece_bytes)
    : sets_(sets),
      loads_(std::move(loads)),
      least_piece_bytes_(static_cast<int64_t>(std::clamp<uint64_t>(least_piece_bytes, 1, INT64_MAX))) {}

int64_t Balance::least_rows(const Contested& box) const {
  const int64_t row_bytes = box.bytes / box.rows;
  return least_piece_bytes_ / row_bytes + (least_piece_bytes_ % row_bytes != 0);
}

void Balance::place(std::span<const Contested> boxes) {
  std::vector<int64_t> bytes(sets_.size());
  std::vector<uint32_t> sorted(boxes.size());
  std::iota(sorted.begin(), sorted.end(), 0);
  std::sort(sorted.begin(), sorted.end(), [&](uint32_t a, uint32_t b) {
    if (boxes[a].set != boxes[b].set) return boxes[a].set < boxes[b].set;
    return boxes[a].bytes != boxes[b].bytes ? boxes[a].bytes > boxes[b].bytes : a < b;
  });
  std::vector<size_t> begins(sets_.size() + 1);  // of each set's boxes in `sorted`
  for (const Contested& box : boxes) {
    bytes[box.set] += box.bytes;
    ++begins[box.set + 1];
  }
  std::partial_sum(begins.begin(), begins.end(), begins.begin());
  places_.resize(boxes.size());

  // Ranks that can share the least come first: the larger sets then fill the gaps that they leave.
  std::vector<uint32_t> order(sets_.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](uint32_t a, uint32_t b) { return sets_[a].size() < sets_[b].size(); });
  const std::vector<int64_t> poured = pour(sets_, order, bytes, loads_);
  for (const uint32_t set : order) {
    const std::span<const uint32_t> ranks = sets_[set];
    for (size_t i = 0; i < ranks.size(); ++i) loads_[ranks[i]] -= poured[sets_.begin(set) + i];
    place_set(set, bytes[set], boxes, std::span(sorted).subspan(begins[set], begins[set + 1] - begins[set]));
  }
}

void Balance::place_set(uint32_t set, int64_t bytes, std::span<const Contested> boxes,
                        std::span<const uint32_t> sorted) {
  const std::span<const uint32_t> ranks = sets_[set];
  const int64_t level = water_level(ranks, loads_, bytes), slack = level / kSlack;
  std::vector<int64_t> rooms;
  rooms.reserve(ranks.size());
  for (const uint32_t rank : ranks) rooms.push_back(level - loads_[rank]);
  MostRoom room(std::move(rooms));
  const auto place_box = [&](uint32_t i, const auto& place) {
    places_[i].begin = shares_.size();
    const bool placed = place(boxes[i]);
    places_[i].count = shares_.size() - places_[i].begin;
    return placed;
  };
  std::vector<uint32_t> too_large;  // for any room; poured into what the others leave, like sand between stones
  for (const uint32_t i : sorted) {
    const bool placed = place_box(i, [&](const Contested& box) {
      if (box.previous.size() == 1 && keep(box, ranks, room, slack)) return true;
      const size_t member = room.most();
      if (room[member] + slack < box.bytes && box.rows / 2 >= least_rows(box)) return false;
      shares_.push_back({ranks[member], 0, box.rows});
      room.take(member, box.bytes);
      return true;
    });
    if (!placed) too_large.push_back(i);
  }
  for (const uint32_t i : too_large) {
    place_box(i, [&](const Contested& box) {
      if (!keep(box, ranks, room, slack)) split(box, ranks, room, slack);
      return true;
    });
  }
  for (size_t i = 0; i < ranks.size(); ++i) loads_[ranks[i]] = level - room[i];
}

bool Balance::keep(const Contested& box, std::span<const uint32_t> ranks, MostRoom& room, int64_t slack) {
  if (box.previous.empty()) return false;
  const int64_t row_bytes = box.bytes / box.rows;
  size_t kept = 0;
  for (; kept < box.previous.size(); ++kept) {
    const Share& share = box.previous[kept];
    const size_t member = member_of(ranks, share.rank);
    const int64_t bytes = share.length * row_bytes;
    if (bytes > room[member] + slack || (box.previous.size() > 1 && bytes < least_piece_bytes_)) break;
    room.take(member, bytes);
  }
  if (kept == box.previous.size()) {
    shares_.insert(shares_.end(), box.previous.begin(), box.previous.end());
    return true;
  }
  for (const Share& share : box.previous.first(kept)) {
    room.take(member_of(ranks, share.rank), -share.length * row_bytes);
  }
  return false;
}

void Balance::split(const Contested& box, std::span<const uint32_t> ranks, MostRoom& room, int64_t slack) {
  const int64_t row_bytes = box.bytes / box.rows, least = least_rows(box);
  // Large rows go where they fit best; with small ones a bit too much is less than a piece more.
  const int64_t rounding = row_bytes > slack ? row_bytes / 2 : row_bytes - 1;
  const size_t first = shares_.size();
  for (int64_t start = 0; start < box.rows;) {
    const size_t member = room.most();
    int64_t length = box.rows - start;
    if (room[member] + slack < length * row_bytes) {
      const int64_t fitting = (std::max<int64_t>(room[member], 0) + rounding) / row_bytes;
      const int64_t rest = length - std::max(fitting, least);
      if (rest >= least) {
        length -= rest;
      } else if (length >= 2 * least) {
        length -= least;
      }
    }
    if (shares_.size() > first && shares_.back().rank == ranks[member]) {
      shares_.back().length += length;
    } else {
      shares_.push_back({ranks[member], start, length});
    }
    room.take(member, length * row_bytes);
    start += length;
  }
}

}  // namespace vescale_ckpt
