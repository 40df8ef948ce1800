#include "plan/local_plans.h"

namespace vescale_ckpt::plan {
namespace {

uint64_t piece_bytes(const Layout& layout, const Layout::Class& of, size_t chunk, const Assignment::Split& split) {
  const int64_t rows = layout.size(of, chunk)[static_cast<size_t>(split.dim)];
  return layout.bytes(of, chunk) / static_cast<uint64_t>(rows) * static_cast<uint64_t>(split.length);
}

}  // namespace

LocalPlans::LocalPlans(const Layout& layout, const Assignment& assignment, uint32_t ranks)
    : tensors_(ranks), objects_(ranks), bytes_(ranks) {
  const auto add = [&](const Layout::Class& of, uint32_t writer, uint64_t rows, uint64_t bytes) {
    (of.kind == state::ItemKind::object ? objects_ : tensors_)[writer] += rows;
    bytes_[writer] += bytes;
    all_rows_ += rows;
  };
  for (const Layout::Class& of : layout.classes) {
    for (size_t chunk = 0; chunk < of.chunks; ++chunk) {
      for (const Assignment::Group& group : assignment.groups_of(of, chunk)) {
        if (group.writer == Assignment::Group::kByKey) continue;
        add(of, group.writer, of.keys, of.keys * layout.bytes(of, chunk));
      }
    }
  }
  uint64_t group = 0;
  for (const uint32_t number : layout.class_of) {
    const Layout::Class& of = layout.classes[number];
    for (uint32_t i = assignment.first_shared_chunk[number]; i < assignment.first_shared_chunk[number + 1];
         ++i, ++group) {
      const uint32_t chunk = assignment.shared_chunks[i];
      for (uint64_t at = assignment.first_piece[group]; at < assignment.first_piece[group + 1]; ++at) {
        const AssignedPiece& piece = assignment.pieces[at];
        add(of, piece.writer, 1,
            piece.split == 0 ? layout.bytes(of, chunk)
                             : piece_bytes(layout, of, chunk, assignment.splits[piece.split - 1]));
      }
    }
  }
}

}  // namespace vescale_ckpt::plan
