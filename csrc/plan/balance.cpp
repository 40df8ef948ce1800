#include "plan/balance.h"

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <utility>

#include "base/fill_level.h"

namespace vescale_ckpt::plan {
namespace {

constexpr int64_t kSlack = 200;     // whole chunks may exceed the level by 1/200 of it
constexpr int64_t kMostRuns = 256;  // the smallest piece has at most so many runs of memory

constexpr uint64_t kMostSteps = uint64_t{1} << 26;  // so many members are visited at most, also if many sets overlap
constexpr uint64_t kMostTurns = 64;
constexpr int64_t kSettled = 1000;  // the last turn moves less than 1/1000 of the level

int64_t rounded_up(int64_t a, int64_t b) {
  return a / b + (a % b != 0);
}

size_t member_of(std::span<const uint32_t> ranks, uint32_t rank) {
  return static_cast<size_t>(std::lower_bound(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

}  // namespace

std::vector<int64_t> split_evenly(const HolderSets& sets, std::span<const uint32_t> order,
                                  std::span<const int64_t> bytes, std::span<int64_t> loads) {
  std::vector<int64_t> split(sets.members());
  const uint64_t affordable = kMostSteps / std::max<uint64_t>(1, sets.members());
  const uint64_t turns = sets.size() > 1 ? std::clamp<uint64_t>(affordable, 1, kMostTurns) : 1;
  bool moving = true;
  for (uint64_t turn = 0; turn < turns && moving; ++turn) {
    moving = false;
    for (const uint32_t set : order) {
      const std::span<const uint32_t> ranks = sets[set];
      int64_t* part = split.data() + sets.begin(set);
      for (size_t i = 0; i < ranks.size(); ++i) loads[ranks[i]] -= part[i];
      const int64_t level = fill_level<int64_t>(ranks, loads, bytes[set]);
      int64_t left = bytes[set];
      for (size_t i = 0; i < ranks.size(); ++i) {
        const int64_t now = std::min(left, std::max<int64_t>(0, level - loads[ranks[i]]));
        left -= now;
        moving |= std::abs(now - part[i]) > level / kSettled;
        part[i] = now;
        loads[ranks[i]] += now;
      }
    }
  }
  return split;
}

// Tracks the room of each member of a set, and which member has the most.
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
      std::pop_heap(heap_.begin(), heap_.end());  // its room has changed since it was pushed
      heap_.pop_back();
    }
  }

  void take(size_t member, int64_t bytes) {
    room_[member] -= bytes;
    heap_.push_back(entry(member));
    std::push_heap(heap_.begin(), heap_.end());
  }

 private:
  // Of equal members the lowest is on top.
  std::pair<int64_t, int64_t> entry(size_t member) const { return {room_[member], -static_cast<int64_t>(member)}; }

  std::vector<int64_t> room_;
  std::vector<std::pair<int64_t, int64_t>> heap_;
};

Balance::Balance(const HolderSets& sets, std::vector<int64_t> loads, uint64_t least_piece_bytes)
    : sets_(sets),
      loads_(std::move(loads)),
      least_piece_bytes_(static_cast<int64_t>(std::clamp<uint64_t>(least_piece_bytes, 1, INT64_MAX))) {}

Balance::Cut Balance::cut_along(const SharedChunk& chunk, int32_t dim) const {
  if (dim < 0) return {-1, 1, chunk.bytes, 1};
  int64_t runs = 1;  // a piece lies in so many runs
  for (const int64_t length : chunk.size.first(static_cast<size_t>(dim))) runs *= length;
  const int64_t rows = chunk.size[static_cast<size_t>(dim)], row_bytes = chunk.bytes / rows;
  const int64_t least =
      std::max(rounded_up(least_piece_bytes_, row_bytes), rounded_up(least_piece_bytes_ / kMostRuns, row_bytes / runs));
  return {dim, rows, row_bytes, least};
}

// Returns the cuts with at least two pieces, from large rows in few runs of memory to small rows in many.
std::vector<Balance::Cut> Balance::cuts_of(const SharedChunk& chunk) const {
  std::vector<Cut> cuts;
  int64_t longest = 1;
  for (size_t dim = 0; dim < chunk.size.size(); ++dim) {
    if (chunk.size[dim] <= longest) continue;
    longest = chunk.size[dim];
    const Cut cut = cut_along(chunk, static_cast<int32_t>(dim));
    if (cut.rows / 2 >= cut.least_rows) cuts.push_back(cut);
  }
  return cuts;
}

void Balance::place(std::span<const SharedChunk> chunks) {
  std::vector<int64_t> bytes(sets_.size());
  std::vector<uint32_t> sorted(chunks.size());
  std::iota(sorted.begin(), sorted.end(), 0);
  std::sort(sorted.begin(), sorted.end(), [&](uint32_t a, uint32_t b) {
    if (chunks[a].set != chunks[b].set) return chunks[a].set < chunks[b].set;
    return chunks[a].bytes != chunks[b].bytes ? chunks[a].bytes > chunks[b].bytes : a < b;
  });
  std::vector<size_t> begins(sets_.size() + 1);  // start of each set's chunks in `sorted`
  for (const SharedChunk& chunk : chunks) {
    bytes[chunk.set] += chunk.bytes;
    ++begins[chunk.set + 1];
  }
  std::partial_sum(begins.begin(), begins.end(), begins.begin());
  places_.resize(chunks.size());

  // The smallest sets come first, because they have the least choice. The larger sets then fill the remaining room.
  std::vector<uint32_t> order(sets_.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](uint32_t a, uint32_t b) { return sets_[a].size() < sets_[b].size(); });
  const std::vector<int64_t> parts = split_evenly(sets_, order, bytes, loads_);
  for (const uint32_t set : order) {
    const std::span<const uint32_t> ranks = sets_[set];
    for (size_t i = 0; i < ranks.size(); ++i) loads_[ranks[i]] -= parts[sets_.begin(set) + i];
    place_set(set, bytes[set], chunks, std::span(sorted).subspan(begins[set], begins[set + 1] - begins[set]));
  }
}

void Balance::place_set(uint32_t set, int64_t bytes, std::span<const SharedChunk> chunks,
                        std::span<const uint32_t> sorted) {
  const std::span<const uint32_t> ranks = sets_[set];
  const int64_t level = fill_level<int64_t>(ranks, loads_, bytes), slack = level / kSlack;
  std::vector<int64_t> rooms;
  rooms.reserve(ranks.size());
  for (const uint32_t rank : ranks) rooms.push_back(level - loads_[rank]);
  MostRoom room(std::move(rooms));
  const auto begin = [&](uint32_t i) { places_[i].begin = shares_.size(); };
  const auto end = [&](uint32_t i, int32_t dim) {
    places_[i].count = static_cast<uint32_t>(shares_.size() - places_[i].begin);
    places_[i].dim = dim;
  };
  std::vector<uint32_t> too_large;  // these chunks exceed every room; they are split over the remaining room at the end
  for (const uint32_t i : sorted) {
    const SharedChunk& chunk = chunks[i];
    begin(i);
    const size_t member = room.most();
    if (room[member] + slack < chunk.bytes && !cuts_of(chunk).empty()) {
      too_large.push_back(i);
      continue;
    }
    shares_.push_back({ranks[member], 0, 1});
    room.take(member, chunk.bytes);
    end(i, -1);
  }
  for (const uint32_t i : too_large) {
    const SharedChunk& chunk = chunks[i];
    begin(i);
    end(i, split(chunk, ranks, room, slack));
  }
  for (size_t i = 0; i < ranks.size(); ++i) loads_[ranks[i]] = level - room[i];
}

// Returns the dimension of the split. A later dimension is worth its many runs of memory only if it lowers the highest
// rank by more than the slack.
int32_t Balance::split(const SharedChunk& chunk, std::span<const uint32_t> ranks, MostRoom& room, int64_t slack) {
  int64_t least_excess = INT64_MAX;
  std::vector<Share> best;
  Cut best_cut{};
  for (const Cut& cut : cuts_of(chunk)) {
    std::vector<Share> shares = fill(cut, ranks, room, slack);
    int64_t excess = 0;
    for (const Share& share : shares) {
      excess = std::max(excess, -room[member_of(ranks, share.rank)]);
    }
    for (const Share& share : shares) room.take(member_of(ranks, share.rank), -share.length * cut.row_bytes);
    if (excess < least_excess - slack) {
      least_excess = excess;
      best = std::move(shares);
      best_cut = cut;
    }
    if (least_excess <= slack) break;
  }
  if (best.size() == 1) {
    best_cut = cut_along(chunk, -1);
    best[0].length = 1;
  }
  for (const Share& share : best) room.take(member_of(ranks, share.rank), share.length * best_cut.row_bytes);
  shares_.insert(shares_.end(), best.begin(), best.end());
  return best_cut.dim;
}

// Distributes all rows over the members with the most room.
std::vector<Share> Balance::fill(const Cut& cut, std::span<const uint32_t> ranks, MostRoom& room, int64_t slack) {
  const int64_t row_bytes = cut.row_bytes, least = cut.least_rows;
  // Large rows go to the rank where they fit best. With small rows, a small excess is better than one more piece.
  const int64_t rounding = row_bytes > slack ? row_bytes / 2 : row_bytes - 1;
  std::vector<Share> shares;
  for (int64_t start = 0; start < cut.rows;) {
    const size_t member = room.most();
    int64_t length = cut.rows - start;
    if (room[member] + slack < length * row_bytes) {
      const int64_t fitting = (std::max<int64_t>(room[member], 0) + rounding) / row_bytes;
      const int64_t rest = length - std::max(fitting, least);
      if (rest >= least) {
        length -= rest;
      } else if (length >= 2 * least) {
        length -= least;
      }
    }
    if (!shares.empty() && shares.back().rank == ranks[member]) {
      shares.back().length += length;
    } else {
      shares.push_back({ranks[member], start, length});
    }
    room.take(member, length * row_bytes);
    start += length;
  }
  return shares;
}

}  // namespace vescale_ckpt::plan
