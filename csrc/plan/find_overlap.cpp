#include "plan/find_overlap.h"

#include <algorithm>
#include <vector>

#include "base/overlap.h"

namespace vescale_ckpt::plan {
namespace {

using List = std::vector<uint32_t>;  // indices of boxes

constexpr size_t kFewPairs = 256;  // fewer pairs are compared one by one

// Two intervals overlap if the start of one lies in the other. So for each dimension the search finds which `outer`
// contain the start of which `inner` (Zomorodian and Edelsbrunner, "Fast software for box intersections", 2000).
class Search {
 public:
  Search(const Boxes& boxes, List all) : boxes_(boxes) {
    for (uint32_t dim = 0; dim < boxes.ndim; ++dim) {
      const bool equal = std::all_of(all.begin(), all.end(), [&](uint32_t box) {
        return low(box, dim) == low(all[0], dim) && high(box, dim) == high(all[0], dim);
      });
      if (!equal) dims_.push_back(dim);
    }
    if (dims_.empty()) {
      if (all.size() > 1) found_.emplace(all[0], all[1]);
    } else {
      descend(all, all, 0);
    }
  }

  const std::optional<std::pair<size_t, size_t>>& found() const { return found_; }

 private:
  int64_t low(uint32_t box, uint32_t dim) const { return boxes_.offset(box)[dim]; }
  int64_t high(uint32_t box, uint32_t dim) const { return low(box, dim) + boxes_.size(box)[dim]; }

  bool share_element(uint32_t a, uint32_t b) const {
    return a != b && std::all_of(dims_.begin(), dims_.end(), [&](uint32_t dim) {
             return !overlap(low(a, dim), boxes_.size(a)[dim], low(b, dim), boxes_.size(b)[dim]).empty();
           });
  }

  void compare(uint32_t a, uint32_t b) {
    if (!found_ && share_element(a, b)) found_.emplace(std::min(a, b), std::max(a, b));
  }

  // All of them overlap in the dimensions before the `depth`-th.
  void descend(const List& outer, List inner, size_t depth) {
    if (found_ || outer.empty() || inner.empty()) return;
    if (outer.size() * inner.size() <= kFewPairs) {
      for (const uint32_t a : outer) {
        for (const uint32_t b : inner) compare(a, b);
      }
      return;
    }
    const uint32_t dim = dims_[depth];
    const auto by_start = [&](uint32_t a, uint32_t b) { return low(a, dim) < low(b, dim); };
    if (depth + 1 == dims_.size()) {
      std::sort(inner.begin(), inner.end(), by_start);
      for (const uint32_t a : outer) {  // stops at the second start in `a`, which may contain only its own
        auto at = std::lower_bound(inner.begin(), inner.end(), low(a, dim),
                                   [&](uint32_t box, int64_t value) { return low(box, dim) < value; });
        for (; !found_ && at != inner.end() && low(*at, dim) < high(a, dim); ++at) compare(a, *at);
      }
      return;
    }

    const auto [first, last] = std::minmax_element(inner.begin(), inner.end(), by_start);
    const int64_t least = low(*first, dim), most = low(*last, dim);
    List around, crossing;  // intervals that contain all starts, or some
    for (const uint32_t box : outer) {
      if (low(box, dim) <= least && high(box, dim) > most) {
        around.push_back(box);
      } else if (low(box, dim) <= most && high(box, dim) > least) {
        crossing.push_back(box);
      }
    }
    descend(around, inner, depth + 1);
    if (around != inner) descend(inner, around, depth + 1);
    if (crossing.empty()) return;

    const auto middle = inner.begin() + static_cast<ptrdiff_t>(inner.size() / 2);
    std::nth_element(inner.begin(), middle, inner.end(), by_start);
    int64_t cut = low(*middle, dim);
    if (cut == least) {
      cut = most;
      for (const uint32_t box : inner) {
        if (low(box, dim) > least) cut = std::min(cut, low(box, dim));
      }
    }
    const auto right = std::partition(inner.begin(), inner.end(), [&](uint32_t box) { return low(box, dim) < cut; });
    List left_outer, right_outer;
    for (const uint32_t box : crossing) {
      if (low(box, dim) < cut) left_outer.push_back(box);
      if (high(box, dim) > cut) right_outer.push_back(box);
    }
    descend(left_outer, List(inner.begin(), right), depth);
    descend(right_outer, List(right, inner.end()), depth);
  }

  const Boxes& boxes_;
  std::vector<uint32_t> dims_;  // dimensions in which the boxes differ
  std::optional<std::pair<size_t, size_t>> found_;
};

}  // namespace

std::optional<std::pair<size_t, size_t>> find_overlap(const Boxes& boxes, size_t begin, size_t end) {
  List all;
  all.reserve(end - begin);
  for (size_t box = begin; box < end; ++box) all.push_back(static_cast<uint32_t>(box));
  return Search(boxes, std::move(all)).found();
}

}  // namespace vescale_ckpt::plan
