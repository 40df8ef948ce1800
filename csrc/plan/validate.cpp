#include "plan/validate.h"

#include <algorithm>
#include <numeric>

#include "base/overlap.h"

namespace vescale_ckpt::plan {
namespace {

class Check {
 public:
  Check(std::span<const int64_t> shape, const Boxes& boxes) : shape_(shape), boxes_(boxes) {}

  // Boxes begin .. end are equal in the dimensions before `dim`.
  void slabs(size_t begin, size_t end, uint32_t dim) {
    if (dim == shape_.size()) return;
    int64_t covered = 0;  // so many indices of this dimension
    for (size_t slab = begin, next = begin; slab < end; slab = next) {
      const int64_t start = boxes_.offset(slab)[dim], length = boxes_.size(slab)[dim];
      for (next = slab + 1; next < end && boxes_.offset(next)[dim] == start; ++next) {
        if (boxes_.size(next)[dim] != length) return tangled(begin, end);
      }
      if (start < covered) return tangled(begin, end);
      hole(begin, dim, covered, start);
      covered = start + length;
    }
    hole(begin, dim, covered, shape_[dim]);
    for (size_t slab = begin, next = begin; slab < end; slab = next) {
      const int64_t start = boxes_.offset(slab)[dim];
      for (next = slab + 1; next < end && boxes_.offset(next)[dim] == start;) ++next;
      slabs(slab, next, dim + 1);
      if (result.overlap) return;
    }
  }

  Tiling result;

 private:
  void tangled(size_t begin, size_t end) { result.overlap = find_overlap(boxes_, begin, end); }

  // Notes that indices `from` .. `to` of `dim`, in the slab of `box`, are in no box.
  void hole(size_t box, uint32_t dim, int64_t from, int64_t to) {
    if (from == to || !result.hole_size.empty()) return;
    result.hole_offset.assign(boxes_.offset(box), boxes_.offset(box) + dim);
    result.hole_size.assign(boxes_.size(box), boxes_.size(box) + dim);
    result.hole_offset.push_back(from);
    result.hole_size.push_back(to - from);
    result.hole_offset.resize(shape_.size(), 0);
    result.hole_size.insert(result.hole_size.end(), shape_.begin() + dim + 1, shape_.end());
  }

  std::span<const int64_t> shape_;
  const Boxes& boxes_;
};

uint64_t product(const int64_t* values, size_t count) {
  uint64_t result = 1;
  for (size_t i = 0; i < count; ++i) result *= static_cast<uint64_t>(values[i]);
  return result;
}

}  // namespace

std::optional<std::pair<size_t, size_t>> find_overlap(const Boxes& boxes, size_t begin, size_t end) {
  std::vector<size_t> order(end - begin);
  std::iota(order.begin(), order.end(), begin);
  const auto sort = [&](uint32_t dim) {
    std::ranges::stable_sort(order, {}, [&](size_t box) { return boxes.offset(box)[dim]; });
  };
  // Along the dimension with the most different offsets, a box has the fewest others beside it.
  uint32_t along = 0;
  ptrdiff_t most = -1;
  for (uint32_t dim = 0; dim < boxes.ndim; ++dim) {
    sort(dim);
    const auto differ = [&](size_t a, size_t b) { return boxes.offset(a)[dim] != boxes.offset(b)[dim]; };
    ptrdiff_t steps = 0;
    for (size_t i = 1; i < order.size(); ++i) steps += differ(order[i - 1], order[i]);
    if (steps <= most) continue;
    most = steps;
    along = dim;
  }
  sort(along);
  const auto meet = [&](size_t a, size_t b, uint32_t dim) {
    return !overlap(boxes.offset(a)[dim], boxes.size(a)[dim], boxes.offset(b)[dim], boxes.size(b)[dim]).empty();
  };
  for (size_t i = 0; i < order.size(); ++i) {
    for (size_t j = i + 1; j < order.size() && meet(order[i], order[j], along); ++j) {
      bool in_all = true;
      for (uint32_t dim = 0; dim < boxes.ndim && in_all; ++dim) in_all = meet(order[i], order[j], dim);
      if (in_all) return std::minmax(order[i], order[j]);
    }
  }
  return std::nullopt;
}

Tiling check_tiling(std::span<const int64_t> shape, const Boxes& boxes, size_t count) {
  Check check(shape, boxes);
  check.slabs(0, count, 0);
  Tiling& tiling = check.result;
  if (tiling.overlap) return std::move(tiling);
  // Disjoint boxes within the shape have no more elements than it has: neither sum can overflow.
  tiling.missing = product(shape.data(), shape.size());
  for (size_t box = 0; box < count; ++box) tiling.missing -= product(boxes.size(box), shape.size());
  return std::move(tiling);
}

}  // namespace vescale_ckpt::plan
