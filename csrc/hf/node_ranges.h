// Chooses the ranges of files that the ranks of a node put together in shared memory before one of them writes each.
//
// These are whole blocks, all of whose bytes ranks of one node hold: blocks of tensors whose boxes have short runs in
// the file, which would be a call for each run; and blocks in which one rank's bytes end and another's begin, where
// such tensors are near. The ranges of a node are dealt out to its ranks as writers, evenly, each a stretch of them. A
// writer's stretch is cut into windows, one a round.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace vescale_ckpt::hf {

// What follows one another in a file without a gap.
struct HeldSpan {
  static constexpr int64_t kNobody = -1;

  uint32_t file = 0;
  uint64_t begin = 0, end = 0;
  int64_t node = kNobody;  // whose ranks hold all of it; nobody: of several nodes, or it stays as it is
  int64_t rank = kNobody;  // that holds all of it; nobody: several ranks of the node hold short runs of it
};

struct NodeRange {
  static constexpr size_t kWords = 6;

  uint32_t file = 0;
  uint64_t begin = 0, end = 0;  // in the file: whole blocks
  uint32_t writer = 0;          // number among the ranks of the node
  uint32_t round = 0;
  uint64_t at = 0;  // in the writer's window of the round; a multiple of kBlock
};

// The ranges of each node, in the order of the files. `spans`: in the order of the files; `ranks`: of each node, how
// many. A node with a single rank, and one with less than `least_bytes` of them, has none.
std::vector<std::vector<NodeRange>> choose_node_ranges(std::span<const HeldSpan> spans, std::span<const uint32_t> ranks,
                                                       uint64_t window_bytes, uint64_t least_bytes);

// As rows of file, begin, end, writer, round, offset in the window.
std::vector<int64_t> range_rows(std::span<const NodeRange> ranges);

// The ranges of files of an object store, which takes each file in order from one rank: all of each file, from its
// first byte on, in the order of the files. The files are dealt out evenly to ranks, of which each is a writer.
std::vector<NodeRange> choose_stream_ranges(std::span<const uint64_t> file_bytes, uint32_t ranks,
                                            uint64_t window_bytes);

}  // namespace vescale_ckpt::hf
