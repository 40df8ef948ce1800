#include "metadata/box_tree.h"

#include <algorithm>

#include "base/overlap.h"

namespace vescale_ckpt::metadata {

struct BoxTree::Query {
  std::span<const int64_t> offset, size, nodes;
  const Found& found;

  bool meets(const int64_t* node) const {
    for (size_t dim = 0; dim < offset.size(); ++dim) {
      if (overlap(offset[dim], size[dim], node[dim], node[offset.size() + dim]).empty()) return false;
    }
    return true;
  }
};

BoxTree::BoxTree(uint64_t boxes, size_t ndim) : ndim_(ndim) {
  first_ = {0, boxes};
  for (uint64_t level = boxes; level > kFanOut;) {
    level = (level + kFanOut - 1) / kFanOut;
    first_.push_back(first_.back() + level);
  }
}

void BoxTree::fill(std::span<int64_t> nodes) const {
  const size_t words = 2 * ndim_;
  for (size_t level = 1; level + 1 < first_.size(); ++level) {
    for (uint64_t node = first_[level]; node < first_[level + 1]; ++node) {
      const uint64_t child = first_[level - 1] + (node - first_[level]) * kFanOut;
      const uint64_t children = std::min(kFanOut, first_[level] - child);
      int64_t* bound = nodes.data() + node * words;
      std::fill_n(bound, words, 0);
      bool any = false;
      for (uint64_t i = 0; i < children; ++i) {
        const int64_t* box = nodes.data() + (child + i) * words;
        if (std::find(box + ndim_, box + words, 0) != box + words) continue;  // an empty box does not count
        for (size_t dim = 0; dim < ndim_; ++dim) {
          const int64_t begin = any ? std::min(bound[dim], box[dim]) : box[dim];
          const int64_t end = end_of(box[dim], box[ndim_ + dim]);
          bound[ndim_ + dim] = (any ? std::max(end_of(bound[dim], bound[ndim_ + dim]), end) : end) - begin;
          bound[dim] = begin;
        }
        any = true;
      }
    }
  }
}

uint64_t BoxTree::overlaps(std::span<const int64_t> offset, std::span<const int64_t> size,
                           std::span<const int64_t> nodes, const Found& found) const {
  const size_t top = first_.size() - 2;
  return descend({offset, size, nodes, found}, top, 0, first_[top + 1] - first_[top]);
}

uint64_t BoxTree::descend(const Query& query, size_t level, uint64_t first, uint64_t count) const {
  if (count == 0) return 0;
  uint64_t visited = count;
  const int64_t* nodes = query.nodes.data() + (first_[level] + first) * 2 * ndim_;
  for (uint64_t i = 0; i < count; ++i) {
    const int64_t* node = nodes + i * 2 * ndim_;
    if (!query.meets(node)) continue;
    if (level == 0) {
      query.found(first + i, node);
    } else {
      const uint64_t child = (first + i) * kFanOut;
      visited += descend(query, level - 1, child, std::min(kFanOut, first_[level] - first_[level - 1] - child));
    }
  }
  return visited;
}

}  // namespace vescale_ckpt::metadata
