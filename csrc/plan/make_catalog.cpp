#include "plan/make_catalog.h"

#include <algorithm>

namespace vescale_ckpt::plan {
namespace {

// Pieces of one box on several nodes stand node after node.
std::span<const AssignedPiece> seen_by(std::span<const AssignedPiece> pieces, std::span<const uint32_t> nodes,
                                       uint32_t node) {
  const auto on = [&](uint32_t wanted) {
    const auto is_there = [&](const AssignedPiece& piece) { return nodes[piece.writer] == wanted; };
    const auto begin = std::find_if(pieces.begin(), pieces.end(), is_there);
    return std::span<const AssignedPiece>(begin, std::find_if_not(begin, pieces.end(), is_there));
  };
  const std::span<const AssignedPiece> own = on(node);
  return own.empty() ? on(nodes[pieces[0].writer]) : own;
}

}  // namespace

metadata::Catalog make_catalog(const Layout& layout, const Assignment& assignment, std::span<const uint32_t> nodes,
                               uint32_t node, bool copies) {
  metadata::Catalog catalog;
  catalog.names = layout.names.text();
  catalog.ranks = static_cast<uint32_t>(nodes.size());
  catalog.keys.reserve(layout.keys.size());
  catalog.chunks.reserve(assignment.pieces.size());
  catalog.dims.reserve(layout.shapes.size() + layout.dims.size());
  catalog.dims.assign(layout.shapes.begin(), layout.shapes.end());
  for (uint32_t number = 0; number < layout.keys.size(); ++number) {
    const Layout::Key& key = layout.keys[number];
    const uint64_t first = catalog.chunks.size();
    bool split = false;
    for (size_t box = 0; box < key.boxes; ++box) {
      const std::span<const int64_t> offset = layout.offset(key, box), size = layout.size(key, box);
      std::span<const AssignedPiece> pieces = assignment.pieces_of(key, box);
      if (copies) pieces = seen_by(pieces, nodes, node);
      for (const AssignedPiece& piece : pieces) {
        const uint64_t at = catalog.dims.size();
        catalog.dims.insert(catalog.dims.end(), offset.begin(), offset.end());
        catalog.dims.insert(catalog.dims.end(), size.begin(), size.end());
        if (piece.split != 0) {
          const Assignment::Split& part = assignment.splits[piece.split - 1];
          const auto dim = static_cast<size_t>(part.dim);
          catalog.dims[at + dim] += part.start;
          catalog.dims[at + key.ndim + dim] = part.length;
          split = true;
        }
        catalog.chunks.push_back({at, piece.writer, piece.row});
      }
    }
    if (split) {  // pieces of boxes that stand side by side alternate
      std::sort(catalog.chunks.begin() + static_cast<ptrdiff_t>(first), catalog.chunks.end(),
                [&](const metadata::Catalog::Chunk& a, const metadata::Catalog::Chunk& b) {
                  const int64_t* of_a = catalog.dims.data() + a.box;
                  const int64_t* of_b = catalog.dims.data() + b.box;
                  return std::lexicographical_compare(of_a, of_a + key.ndim, of_b, of_b + key.ndim);
                });
    }
    catalog.keys.push_back({.name = layout.names.begin(number),
                            .name_bytes = static_cast<uint32_t>(layout.names[number].size()),
                            .kind = key.kind,
                            .dtype = key.dtype,
                            .flags = key.flags,
                            .ndim = key.ndim,
                            .shape = key.shape,
                            .first_chunk = first,
                            .chunks = catalog.chunks.size() - first});
  }
  return catalog;
}

}  // namespace vescale_ckpt::plan
