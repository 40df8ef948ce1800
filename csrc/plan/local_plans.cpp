#include "plan/local_plans.h"

#include <algorithm>
#include <array>
#include <functional>
#include <tuple>

#include "base/workers.h"

namespace vescale_ckpt::plan {
namespace {

// Gives the row of each piece in its writer's local plan, for queries key after key, chunk after chunk, node after
// node.
class RowNumbers {
 public:
  RowNumbers(const Layout& layout, const Assignment& assignment, const LocalPlans& plans, unsigned threads) {
    const size_t ranks = layout.block_of.size();
    next_.resize(ranks);
    std::vector<uint8_t> is_sorted;
    for (const Layout::Block& block : layout.blocks) {
      const std::vector<uint32_t>& keys = layout.keys(block);
      is_sorted.push_back(std::ranges::is_sorted(keys, std::less_equal<>()));  // and no key occurs twice
    }
    const auto sorted = [&](size_t rank) { return is_sorted[layout.block_of[rank]] != 0; };
    for (uint32_t rank = 0; rank < ranks; ++rank) next_[rank] = {0, static_cast<uint32_t>(plans.tensors(rank))};
    if (std::ranges::all_of(is_sorted, std::identity())) return;
    in_order_.resize(ranks);
    parallel_for(threads, ranks, 16, [&] {
      return [&](size_t rank) {
        if (!sorted(rank)) in_order_[rank] = asked(layout, assignment, static_cast<uint32_t>(rank));
      };
    });
  }

  uint32_t next(uint32_t writer, bool object) {
    if (in_order_.empty() || in_order_[writer].empty()) return next_[writer][object]++;
    return in_order_[writer][next_[writer][0]++];
  }

 private:
  // Returns the rows of a rank in the order of the queries.
  static std::vector<uint32_t> asked(const Layout& layout, const Assignment& assignment, uint32_t rank) {
    std::vector<std::tuple<uint32_t, uint32_t, uint32_t>> rows;  // key, group, row
    for_each_row(layout, assignment, rank, [&](uint32_t, uint32_t key, uint32_t group, const Assignment::Split*) {
      rows.emplace_back(key, group, static_cast<uint32_t>(rows.size()));
    });
    std::ranges::sort(rows);
    std::vector<uint32_t> numbers;
    numbers.reserve(rows.size());
    for (const auto& row : rows) numbers.push_back(std::get<2>(row));
    return numbers;
  }

  std::vector<std::array<uint32_t, 2>> next_;    // next row of each rank's tensors and objects
  std::vector<std::vector<uint32_t>> in_order_;  // rows of ranks whose items are not in the order of keys
};

class Maker {
 public:
  Maker(const Layout& layout, const Assignment& assignment, const LocalPlans& plans, unsigned threads)
      : layout_(layout), assignment_(assignment), rows_(layout, assignment, plans, threads) {
    catalog.names = layout.names.text();
    catalog.ranks = static_cast<uint32_t>(layout.block_of.size());
    catalog.keys.reserve(layout.class_of.size());
    catalog.chunks.reserve(plans.rows());
    catalog.dims.reserve(layout.shapes.size() + layout.dims.size());
    catalog.dims.assign(layout.shapes.begin(), layout.shapes.end());
    catalog.dims.insert(catalog.dims.end(), layout.dims.begin(), layout.dims.end());  // all keys of a class share them
    for (uint32_t key = 0; key < layout.class_of.size(); ++key) add(key);
  }

  metadata::Catalog catalog;

 private:
  void add(uint32_t key);

  const Layout& layout_;
  const Assignment& assignment_;
  RowNumbers rows_;
};

void Maker::add(uint32_t key) {
  const Layout::Class& of = layout_.classes[layout_.class_of[key]];
  const uint64_t first = catalog.chunks.size();
  const bool object = of.kind == state::ItemKind::object;
  bool split = false;
  for (size_t chunk = 0; chunk < of.chunks; ++chunk) {
    const uint64_t whole = layout_.shapes.size() + of.dims + chunk * 2 * of.ndim;
    const std::span<const Assignment::Group> groups = assignment_.groups_of(of, chunk);
    for (const Assignment::Group& group : groups) {  // node after node
      const bool seen = &group == &groups[0];
      if (group.writer != Assignment::Group::kByKey) {
        const uint32_t row = rows_.next(group.writer, object);
        if (seen) catalog.chunks.push_back({whole, group.writer, row});
        continue;
      }
      for (const AssignedPiece& piece : assignment_.pieces_of(key, group)) {
        const uint32_t row = rows_.next(piece.writer, object);
        if (!seen) continue;
        uint64_t at = whole;
        if (piece.split != 0) {
          const Assignment::Split& part = assignment_.splits[piece.split - 1];
          const auto dim = static_cast<size_t>(part.dim);
          at = catalog.dims.size();
          for (size_t i = 0; i < size_t{2} * of.ndim; ++i)
            catalog.dims.push_back(layout_.dims[of.dims + chunk * 2 * of.ndim + i]);
          catalog.dims[at + dim] += part.start;
          catalog.dims[at + of.ndim + dim] = part.length;
          split = true;
        }
        catalog.chunks.push_back({at, piece.writer, row});
      }
    }
  }
  if (split) {  // sorts pieces, because those of chunks that lie side by side alternate
    std::sort(catalog.chunks.begin() + static_cast<ptrdiff_t>(first), catalog.chunks.end(),
              [&](const metadata::Catalog::Chunk& a, const metadata::Catalog::Chunk& b) {
                const int64_t* of_a = catalog.dims.data() + a.box;
                const int64_t* of_b = catalog.dims.data() + b.box;
                return std::lexicographical_compare(of_a, of_a + of.ndim, of_b, of_b + of.ndim);
              });
  }
  catalog.keys.push_back({.name = layout_.names.begin(key),
                          .name_bytes = static_cast<uint32_t>(layout_.names[key].size()),
                          .kind = of.kind,
                          .dtype = of.dtype,
                          .flags = of.flags,
                          .ndim = of.ndim,
                          .shape = of.shape,
                          .first_chunk = first,
                          .chunks = catalog.chunks.size() - first});
}

}  // namespace

LocalPlans::LocalPlans(const Layout& layout, const Assignment& assignment, uint32_t ranks)
    : tensors_(ranks), objects_(ranks) {
  const auto add = [&](const Layout::Class& of, uint32_t writer, uint64_t rows) {
    (of.kind == state::ItemKind::object ? objects_ : tensors_)[writer] += rows;
    all_rows_ += rows;
  };
  for (const Layout::Class& of : layout.classes) {
    for (size_t chunk = 0; chunk < of.chunks; ++chunk) {
      for (const Assignment::Group& group : assignment.groups_of(of, chunk)) {
        if (group.writer == Assignment::Group::kByKey) continue;
        add(of, group.writer, of.keys);
      }
    }
  }
  uint64_t group = 0;
  for (const uint32_t number : layout.class_of) {
    const Layout::Class& of = layout.classes[number];
    const uint64_t end = group + assignment.first_shared_chunk[number + 1] - assignment.first_shared_chunk[number];
    for (; group < end; ++group) {
      for (uint64_t at = assignment.first_piece[group]; at < assignment.first_piece[group + 1]; ++at) {
        add(of, assignment.pieces[at].writer, 1);
      }
    }
  }
}

metadata::Catalog make_catalog(const Layout& layout, const Assignment& assignment, const LocalPlans& plans,
                               unsigned threads) {
  return std::move(Maker(layout, assignment, plans, threads).catalog);
}

}  // namespace vescale_ckpt::plan
