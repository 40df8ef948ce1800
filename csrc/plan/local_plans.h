// Computes the local plan of each rank, the pieces that it writes in the order of writing, and the catalog of all.
#pragma once

#include <cstdint>
#include <vector>

#include "metadata/catalog.h"
#include "plan/assign.h"
#include "plan/layout.h"

namespace vescale_ckpt::plan {

// Holds the sizes of all local plans. The rows are computed on demand from the layout and the assignment, which must
// outlive this: tables of all ranks' rows would be the largest part of a plan.
class LocalPlans {
 public:
  static constexpr size_t kRowWords = 4;  // item, dim (-1: the whole chunk), start, length

  LocalPlans() = default;  // without ranks
  LocalPlans(const Layout& layout, const Assignment& assignment, uint32_t ranks);

  uint64_t rows() const { return all_rows_; }  // sum over all ranks
  uint64_t rows(uint32_t rank) const { return tensors_[rank] + objects_[rank]; }
  uint64_t tensors(uint32_t rank) const { return tensors_[rank]; }

 private:
  std::vector<uint64_t> tensors_, objects_;
  uint64_t all_rows_ = 0;
};

// Calls body(item, key, group's index, split or null) for each row of the rank's local plan, in order: tensors before
// objects, both in the order of the rank's items, and pieces of a chunk by rising start.
template <typename Body>
void for_each_row(const Layout& layout, const Assignment& assignment, uint32_t rank, const Body& body) {
  const Layout::Block& block = layout.block(rank);
  const std::vector<uint32_t>& keys = layout.keys(block);
  const uint32_t* group_of = assignment.group_of.data() + assignment.first_slot[rank];
  for (const bool objects : {false, true}) {
    bool others = false;
    for (uint32_t item = 0; item < keys.size(); ++item) {
      const uint32_t number = group_of[block.slots[item]], key = keys[item];
      if (number == Assignment::kNoGroup) continue;
      if ((layout.classes[layout.class_of[key]].kind == state::ItemKind::object) != objects) {
        others = true;
        continue;
      }
      const Assignment::Group& group = assignment.groups[number];
      if (group.writer != Assignment::Group::kByKey) {
        body(item, key, number, nullptr);
        continue;
      }
      for (const AssignedPiece& piece : assignment.pieces_of(key, group)) {
        if (piece.writer != rank) continue;
        body(item, key, number, piece.split == 0 ? nullptr : &assignment.splits[piece.split - 1]);
      }
    }
    if (!others) return;
  }
}

// Makes the catalog of a planned save. Several nodes may write a chunk: the catalog names the copy of the lowest node
// that has one.
metadata::Catalog make_catalog(const Layout& layout, const Assignment& assignment, const LocalPlans& plans,
                               unsigned threads);

}  // namespace vescale_ckpt::plan
