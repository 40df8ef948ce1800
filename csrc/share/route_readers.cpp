#include "share/route_readers.h"

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "base/fill_level.h"

namespace vescale_ckpt::share {
namespace {

// Smaller differences are not worth a cut, at which both sides read a block of checksums.
constexpr uint64_t kTolerance = 2 << 20;

// Gives pieces of one set to its ranks; each goes on with the next until it has its share. Cuts are added to `pieces`.
void share(std::vector<Piece>& pieces, std::span<const size_t> group, std::span<const uint32_t> set,
           std::span<uint64_t> bytes) {
  uint64_t total = 0;
  for (const size_t number : group) total += pieces[number].bytes;
  const uint64_t level = fill_level<uint64_t>(set, bytes, total);
  size_t current = 0;
  const auto room = [&] { return level - std::min(level, bytes[set[current]]); };
  for (const size_t number : group) {
    Piece piece = std::move(pieces[number]);
    for (bool taken = false; !taken;) {
      while (current < set.size() && room() == 0) ++current;
      uint32_t reader = 0;
      std::optional<Piece> rest;
      if (current == set.size()) {
        reader = *std::ranges::min_element(set, {}, [&](uint32_t rank) { return bytes[rank]; });
      } else {
        reader = set[current];
        const bool fits = piece.bytes <= room() + kTolerance / 2;
        if (!fits && room() >= kTolerance / 2) rest = piece.cut(room());
        if (!fits && !rest && piece.bytes / 2 > room()) {
          ++current;
          continue;
        }
      }
      piece.reader = reader;
      bytes[reader] += piece.bytes;
      taken = !rest;
      if (rest) {
        ++current;
        pieces.push_back(std::exchange(piece, std::move(*rest)));
      }
    }
    pieces[number] = std::move(piece);
  }
}

void in_order(std::vector<Piece>& pieces) {
  std::ranges::sort(pieces, [](const Piece& left, const Piece& right) {
    return std::tie(left.set, left.order, left.box.offset) < std::tie(right.set, right.order, right.box.offset);
  });
}

}  // namespace

void choose_readers(Pieces& all, std::span<uint64_t> bytes) {
  std::vector<std::vector<size_t>> groups(all.sets.size());
  for (size_t i = 0; i < all.pieces.size(); ++i) groups[all.pieces[i].set].push_back(i);
  // What few need comes first, as it leaves little choice.
  std::vector<size_t> order(all.sets.size());
  for (size_t set = 0; set < order.size(); ++set) order[set] = set;
  std::ranges::stable_sort(order, {}, [&](size_t set) { return all.sets[set].size(); });
  for (const size_t set : order) {
    if (!groups[set].empty()) share(all.pieces, groups[set], all.sets[set], bytes);
  }
  in_order(all.pieces);
}

}  // namespace vescale_ckpt::share
