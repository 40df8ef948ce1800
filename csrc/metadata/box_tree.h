// Finds which of many boxes overlap one box, with a tree of bounding boxes over boxes in the order of their offsets.
//
// If a tensor was cut into slices or a grid, boxes that follow each other in that order lie together. A query then
// visits O(log n) nodes and the boxes that it finds, not all chunks of a stored tensor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace vescale_ckpt::metadata {

// A node is a box, offset[ndim] and size[ndim]. Level 0 are the boxes themselves; each node of level k + 1 bounds the
// next 16 of level k; the highest level has 16 nodes at most. Nodes lie level after level.
class BoxTree {
 public:
  static constexpr uint64_t kFanOut = 16;

  BoxTree(uint64_t boxes, size_t ndim);

  uint64_t nodes() const { return first_.back(); }
  uint64_t words() const { return nodes() * 2 * ndim_; }

  // Computes the levels above 0, which must be in `nodes` already.
  void fill(std::span<int64_t> nodes) const;

  using Found = std::function<void(uint64_t box, const int64_t* node)>;

  // Calls `found` with each of the boxes in `nodes`, of words(), that overlaps, in order. Empty boxes overlap nothing;
  // without dimensions all boxes overlap. Nodes are untrusted: whatever they hold, each is visited once at most.
  // Returns the number of visits.
  uint64_t overlaps(std::span<const int64_t> offset, std::span<const int64_t> size, std::span<const int64_t> nodes,
                    const Found& found) const;

 private:
  struct Query;
  uint64_t descend(const Query& query, size_t level, uint64_t first, uint64_t count) const;

  size_t ndim_;
  std::vector<uint64_t> first_;  // first node of each level, and the end
};

}  // namespace vescale_ckpt::metadata
