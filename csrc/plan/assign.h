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
  uint32_t split;   // 0: the whole box, else splits[split - 1]
};

struct Assignment {
  struct Split {
    int64_t start, length;
    int32_t dim;  // one for all pieces of a box
  };

  // Holders of a box of whom one is to write it, or several a piece each: all, or those of one node.
  struct Group {
    static constexpr uint32_t kByKey = UINT32_MAX;

    uint32_t writer;  // of the box under each key of the class; kByKey: each key has pieces of its own
    uint32_t shared;  // if by key: number among such groups of the class
  };
  static constexpr uint32_t kNoGroup = UINT32_MAX;

  LargeVector<Group> groups;               // of class after class, box after box, node after node
  LargeVector<uint32_t> first_group;       // of each box; one more at the end
  std::vector<uint32_t> shared_boxes;      // the box of each group by key, class after class
  std::vector<uint32_t> first_shared_box;  // of each class; one more at the end
  LargeVector<uint32_t> group_of;          // of what a rank holds, by its slots, rank after rank: or kNoGroup
  std::vector<uint64_t> first_slot;        // of each rank, in group_of

  LargeVector<AssignedPiece> pieces;   // of groups by key: key after key, group after group, in the order of starts
  LargeVector<uint64_t> first_piece;   // of each of these groups; one more at the end
  std::vector<uint64_t> first_shared;  // of each key, among these groups
  std::vector<Split> splits;

  std::span<const Group> groups_of(const Layout::Class& of, size_t box) const {
    const uint32_t* first = first_group.data() + of.first_box + box;
    return {groups.data() + first[0], first[1] - first[0]};
  }
  std::span<const AssignedPiece> pieces_of(uint32_t key, const Group& group) const {
    const uint64_t* first = first_piece.data() + first_shared[key] + group.shared;
    return {pieces.data() + first[0], first[1] - first[0]};
  }
};

// `nodes[rank]` numbers the ranks' nodes; for Placement::local the holders in `layout` are sorted by it. Throws Error
// (invalid) if there are more bytes than can be counted.
Assignment assign(Layout& layout, std::span<const uint32_t> nodes, const PlanOptions& options);

}  // namespace vescale_ckpt::plan
