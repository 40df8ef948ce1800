#include "plan/local_plans.h"

#include <algorithm>
#include <numeric>

#include "base/parallel.h"

namespace vescale_ckpt::plan {
namespace {

uint64_t piece_bytes(const Layout& layout, const Layout::Key& key, size_t box, const Assignment::Split& split) {
  const int64_t rows = layout.size(key, box)[static_cast<size_t>(split.dim)];
  return layout.bytes(key, box) / static_cast<uint64_t>(rows) * static_cast<uint64_t>(split.length);
}

}  // namespace

std::vector<int64_t> LocalPlans::of(uint32_t rank, const Assignment& assignment) const {
  std::vector<int64_t> words;
  words.reserve((first_row[rank + 1] - first_row[rank]) * kRowWords);
  for (uint64_t row = first_row[rank]; row < first_row[rank + 1]; ++row) {
    const AssignedPiece& piece = assignment.pieces[pieces[row]];
    const Assignment::Split split = piece.split == 0 ? Assignment::Split{0, 0, -1} : assignment.splits[piece.split - 1];
    for (const int64_t word : {int64_t{piece.item}, int64_t{split.dim}, split.start, split.length}) {
      words.push_back(word);
    }
  }
  return words;
}

LocalPlans make_local_plans(const Layout& layout, Assignment& assignment, uint32_t ranks, unsigned threads) {
  LargeVector<AssignedPiece>& pieces = assignment.pieces;
  LocalPlans plans;
  plans.first_row.resize(size_t{ranks} + 1);
  plans.bytes.resize(ranks);
  for (const AssignedPiece& piece : pieces) ++plans.first_row[piece.writer + 1];
  std::partial_sum(plans.first_row.begin(), plans.first_row.end(), plans.first_row.begin());

  plans.pieces.resize(pieces.size());
  std::vector<uint64_t> next(plans.first_row.begin(), plans.first_row.end() - 1), first_object;
  for (const bool objects : {false, true}) {
    if (objects) first_object = next;
    for (const Layout::Key& key : layout.keys) {
      if ((key.kind == state::ItemKind::object) != objects) continue;
      for (size_t box = 0; box < key.boxes; ++box) {
        for (const AssignedPiece& piece : assignment.pieces_of(key, box)) {
          plans.pieces[next[piece.writer]++] = static_cast<uint32_t>(&piece - pieces.data());
          plans.bytes[piece.writer] += piece.split == 0
                                           ? layout.bytes(key, box)
                                           : piece_bytes(layout, key, box, assignment.splits[piece.split - 1]);
        }
      }
    }
  }

  struct Row {
    uint32_t item;
    int64_t start;
    uint32_t piece;
  };
  parallel_for(threads, ranks, 16, [&] {
    return [&, rows = std::vector<Row>()](size_t rank) mutable {
      const uint64_t begin = plans.first_row[rank], end = plans.first_row[rank + 1];
      rows.clear();
      for (uint64_t at = begin; at < end; ++at) {
        const AssignedPiece& piece = pieces[plans.pieces[at]];
        const int64_t start = piece.split == 0 ? 0 : assignment.splits[piece.split - 1].start;
        rows.push_back({piece.item, start, plans.pieces[at]});
      }
      const auto before = [](const Row& a, const Row& b) {
        return a.item != b.item ? a.item < b.item : a.start < b.start;
      };
      const auto objects = rows.begin() + static_cast<ptrdiff_t>(first_object[rank] - begin);
      std::sort(rows.begin(), objects, before);
      std::sort(objects, rows.end(), before);
      for (size_t i = 0; i < rows.size(); ++i) {
        plans.pieces[begin + i] = rows[i].piece;
        pieces[rows[i].piece].row = static_cast<uint32_t>(i);
      }
    };
  });
  return plans;
}

}  // namespace vescale_ckpt::plan
