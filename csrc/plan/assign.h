// Assigns a writer to every chunk: one of the ranks that hold it or, with Placement::local, one on each node that holds
// it.
#pragma once

#include <cstdint>
#include <span>
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
  uint64_t least_piece_bytes = uint64_t{1} << 20;  // pieces of a split chunk have at least so many bytes
};

// A whole chunk or a piece of it.
struct AssignedPiece {
  uint32_t writer;  // rank
  uint32_t split;   // 0: the whole chunk; otherwise splits[split - 1]
};

struct Assignment {
  struct Split {
    int64_t start, length;
    int32_t dim;  // all pieces of a chunk have the same
  };

  // Holders of a chunk, one of whom writes it, or several of whom write a piece each: all holders, or those of one
  // node.
  struct Group {
    static constexpr uint32_t kByKey = UINT32_MAX;

    uint32_t writer;  // rank that writes the chunk under each key of the class; kByKey: keys have different pieces
    uint32_t shared;  // with kByKey: index among such groups of the class
  };
  static constexpr uint32_t kNoGroup = UINT32_MAX;

  LargeVector<Group> groups;                 // class after class, chunk after chunk, node after node
  LargeVector<uint32_t> first_group;         // first group of each chunk, and the end
  std::vector<uint32_t> first_shared_chunk;  // first kByKey group of each class, and the end
  LargeVector<uint32_t> group_of;            // group of each slot, rank after rank; or kNoGroup
  std::vector<uint64_t> first_slot;          // start of each rank in group_of

  LargeVector<AssignedPiece> pieces;   // pieces of kByKey groups: key after key, group after group, by rising start
  LargeVector<uint64_t> first_piece;   // first piece of each of these groups, and the end
  std::vector<uint64_t> first_shared;  // first of these groups of each key
  std::vector<Split> splits;

  std::span<const Group> groups_of(const Layout::Class& of, size_t chunk) const {
    const uint32_t* first = first_group.data() + of.first_chunk + chunk;
    return {groups.data() + first[0], first[1] - first[0]};
  }
  std::span<const AssignedPiece> pieces_of(uint32_t key, const Group& group) const {
    const uint64_t* first = first_piece.data() + first_shared[key] + group.shared;
    return {pieces.data() + first[0], first[1] - first[0]};
  }
};

// `nodes[rank]` is the number of the rank's node. `whole`: of each key whether its chunks are not split. With
// Placement::local, sorts the holders in `layout` by it. Throws Error (invalid) if there are more bytes than can be
// counted.
Assignment assign(Layout& layout, std::span<const uint32_t> nodes, const std::vector<bool>& whole,
                  const PlanOptions& options);

}  // namespace vescale_ckpt::plan
