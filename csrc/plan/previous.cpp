#include "plan/previous.h"

#include <algorithm>

namespace vescale_ckpt::plan {
namespace {

// The number of the box among those of `key`, which are sorted by offset; key.boxes if there is none.
size_t find_box(const Layout& layout, const Layout::Key& key, std::span<const int64_t> offset,
                std::span<const int64_t> size) {
  size_t begin = 0, end = key.boxes;
  while (begin < end) {
    const size_t middle = begin + (end - begin) / 2;
    const std::span<const int64_t> at = layout.offset(key, middle);
    if (std::lexicographical_compare(at.begin(), at.end(), offset.begin(), offset.end())) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  if (begin == key.boxes || !std::ranges::equal(layout.offset(key, begin), offset) ||
      !std::ranges::equal(layout.size(key, begin), size)) {
    return key.boxes;
  }
  return begin;
}

}  // namespace

int32_t PreviousOwners::find(uint32_t key, size_t box, std::span<const Holder> holders, std::vector<Share>& shares) {
  if (key != key_) {
    key_ = key;
    known_ = previous_.layout.names.find(layout_.names[key]);
  }
  if (!known_) return -1;
  const Layout::Key& now = layout_.keys[key];
  const Layout::Key& then = previous_.layout.keys[*known_];
  const std::span<const int64_t> size = layout_.size(now, box);
  const size_t same = find_box(previous_.layout, then, layout_.offset(now, box), size);
  if (same == then.boxes) return -1;

  // A local plan has the box once for each node: the pieces that count are those of ranks that hold it here.
  const size_t first = shares.size();
  int32_t dim = -1;
  int64_t next = 0;
  for (const AssignedPiece& piece : previous_.assignment.pieces_of(then, same)) {
    const auto holder = std::lower_bound(holders.begin(), holders.end(), piece.writer,
                                         [](const Holder& a, uint32_t rank) { return a.rank < rank; });
    if (holder == holders.end() || holder->rank != piece.writer) continue;
    const Assignment::Split split =
        piece.split == 0 ? Assignment::Split{0, 1, -1} : previous_.assignment.splits[piece.split - 1];
    if (next == 0) dim = split.dim;
    if (split.start != next || split.dim != dim) continue;
    shares.push_back({piece.writer, split.start, split.length});
    next += split.length;
    if (next == (dim < 0 ? 1 : size[static_cast<size_t>(dim)])) return dim;
  }
  shares.resize(first);
  return -1;
}

}  // namespace vescale_ckpt::plan
