// Assigns a writer to every box: one of the ranks that hold it or, with Placement::local, one on each node that holds
// it.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/large_vector.h"
#include "plan/layout.h"

namespace vescale_ckpt::plan {

enum class Placement : uint8_t {
  balanced,     // all ranks write about the same number of bytes
  lowest_rank,  // the lowest rank that holds it
  local,        // each node that holds it writes a copy; ranks of a node write about the same number of bytes
};

struct PlanOptions {
  Placement placement = Placement::balanced;
  uint64_t least_piece_bytes = uint64_t{1} << 20;  // no box is split into pieces smaller than this
  std::vector<std::string> whole = {};             // keys whose boxes are not split
};

// A whole box or a piece of it.
struct AssignedPiece {
  uint32_t writer;  // rank
  uint32_t item;    // the writer's own row of the box
  uint32_t row;     // position among what the writer writes
  uint32_t split;   // 0: the whole box, else splits[split - 1]
};

struct Assignment {
  struct Split {
    int64_t start, length;
    int32_t dim;  // one for all pieces of a box
  };

  LargeVector<AssignedPiece> pieces;  // box after box; node after node; in the order of their starts
  LargeVector<uint32_t> first_piece;  // of each box; one more at the end
  std::vector<Split> splits;

  std::span<const AssignedPiece> pieces_of(const Layout::Key& key, size_t box) const {
    const uint32_t* first = first_piece.data() + key.first_box + box;
    return {pieces.data() + first[0], first[1] - first[0]};
  }
};

// Leaves AssignedPiece::row to be filled in. `nodes[rank]` numbers the ranks' nodes; for Placement::local the holders
// in `layout` are sorted by it. Throws Error (invalid) if there are more bytes than can be counted.
Assignment assign(Layout& layout, std::span<const uint32_t> nodes, const PlanOptions& options);

}  // namespace vescale_ckpt::plan
