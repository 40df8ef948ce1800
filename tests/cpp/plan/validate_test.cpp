#include "plan/validate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <ctime>
#include <random>

namespace vescale_ckpt::plan {
namespace {

using Dims = std::vector<int64_t>;

struct Box {
  Dims offset, size;
};

Tiling tiling(const Dims& shape, std::vector<Box> boxes) {
  std::sort(boxes.begin(), boxes.end(), [](const Box& a, const Box& b) { return a.offset < b.offset; });
  std::vector<int64_t> words;
  for (const Box& box : boxes) {
    words.insert(words.end(), box.offset.begin(), box.offset.end());
    words.insert(words.end(), box.size.begin(), box.size.end());
  }
  return check_tiling(shape, {words.data(), static_cast<uint32_t>(shape.size())}, boxes.size());
}

bool tiles(const Dims& shape, const std::vector<Box>& boxes) {
  const Tiling result = tiling(shape, boxes);
  return !result.overlap && result.missing == 0;
}

TEST(Tiling, FindsHoles) {
  const Tiling between = tiling({10, 4}, {{{0, 0}, {3, 4}}, {{5, 0}, {5, 4}}});
  EXPECT_EQ(between.missing, 8u);
  EXPECT_EQ(between.hole_offset, Dims({3, 0}));
  EXPECT_EQ(between.hole_size, Dims({2, 4}));

  const Tiling end = tiling({4, 8, 2}, {{{0, 0, 0}, {2, 8, 2}}, {{2, 0, 0}, {2, 3, 2}}});
  EXPECT_EQ(end.missing, 20u);
  EXPECT_EQ(end.hole_offset, Dims({2, 3, 0}));
  EXPECT_EQ(end.hole_size, Dims({2, 5, 2}));

  EXPECT_EQ(tiling({8}, {{{1}, {7}}}).hole_offset, Dims({0}));
}

TEST(Tiling, FindsTheHoleOfAPinwheel) {  // no line goes through: only the number of the missing is known
  const Tiling pinwheel = tiling({3, 3}, {{{0, 0}, {1, 2}}, {{0, 2}, {2, 1}}, {{1, 0}, {2, 1}}, {{2, 1}, {1, 2}}});
  EXPECT_FALSE(pinwheel.overlap);
  EXPECT_EQ(pinwheel.missing, 1u);
}

// Every answer against counting elements one by one.
TEST(Tiling, AgreesWithCounting) {
  std::mt19937 random(7);
  const auto below = [&](int64_t limit) { return std::uniform_int_distribution<int64_t>(0, limit - 1)(random); };
  size_t overlaps = 0, holes = 0, exact = 0;
  for (int round = 0; round < 3000; ++round) {
    const auto ndim = static_cast<size_t>(1 + below(3));
    Dims shape;
    for (size_t dim = 0; dim < ndim; ++dim) shape.push_back(2 + below(5));
    // Boxes by cutting at random, so that many do tile; sometimes one is dropped or moved.
    std::vector<Box> boxes = {{Dims(ndim), shape}};
    for (int64_t cut = below(12); cut > 0; --cut) {
      const auto box = static_cast<size_t>(below(static_cast<int64_t>(boxes.size())));
      const auto dim = static_cast<size_t>(below(static_cast<int64_t>(ndim)));
      if (boxes[box].size[dim] < 2) continue;
      Box rest = boxes[box];
      const int64_t at = 1 + below(rest.size[dim] - 1);
      boxes[box].size[dim] = at;
      rest.offset[dim] += at;
      rest.size[dim] -= at;
      boxes.push_back(rest);
    }
    const auto any = static_cast<size_t>(below(static_cast<int64_t>(boxes.size())));
    if (below(4) == 0) boxes.erase(boxes.begin() + static_cast<ptrdiff_t>(any));
    if (below(4) == 0 && !boxes.empty()) {
      Box& box = boxes[static_cast<size_t>(below(static_cast<int64_t>(boxes.size())))];
      const auto dim = static_cast<size_t>(below(static_cast<int64_t>(ndim)));
      box.offset[dim] = below(shape[dim]);
      box.size[dim] = 1 + below(shape[dim] - box.offset[dim]);
    }
    std::sort(boxes.begin(), boxes.end(), [](const Box& a, const Box& b) { return a.offset < b.offset; });
    const auto same = [](const Box& a, const Box& b) { return a.offset == b.offset; };
    if (std::adjacent_find(boxes.begin(), boxes.end(), same) != boxes.end()) continue;

    const auto inside = [&](const Box& box, const Dims& at) {
      for (size_t dim = 0; dim < ndim; ++dim) {
        if (at[dim] < box.offset[dim] || at[dim] >= box.offset[dim] + box.size[dim]) return false;
      }
      return true;
    };
    uint64_t missing = 0;
    bool twice = false;
    for (Dims at(ndim); at[0] < shape[0];) {
      const auto times = std::count_if(boxes.begin(), boxes.end(), [&](const Box& box) { return inside(box, at); });
      missing += times == 0;
      twice |= times > 1;
      size_t dim = ndim - 1;
      for (++at[dim]; dim > 0 && at[dim] == shape[dim]; ++at[--dim]) at[dim] = 0;
    }

    const Tiling result = tiling(shape, boxes);
    ASSERT_EQ(result.overlap.has_value(), twice) << round;
    if (twice) {
      ++overlaps;
      const Box &a = boxes[result.overlap->first], &b = boxes[result.overlap->second];
      for (size_t dim = 0; dim < ndim; ++dim) {
        ASSERT_LT(std::max(a.offset[dim], b.offset[dim]),
                  std::min(a.offset[dim] + a.size[dim], b.offset[dim] + b.size[dim]));
      }
      continue;
    }
    ASSERT_EQ(result.missing, missing) << round;
    if (missing > 0)
      ++holes;
    else
      ++exact;
    if (result.hole_size.empty()) continue;
    Box hole{result.hole_offset, result.hole_size};
    for (const Box& box : boxes) {
      bool meets = true;
      for (size_t dim = 0; dim < ndim; ++dim) {
        meets &= std::max(box.offset[dim], hole.offset[dim]) <
                 std::min(box.offset[dim] + box.size[dim], hole.offset[dim] + hole.size[dim]);
      }
      ASSERT_FALSE(meets) << round;
    }
  }
  EXPECT_GT(overlaps, 100u);  // all three happen
  EXPECT_GT(holes, 100u);
  EXPECT_GT(exact, 1000u);
}

class ManyBoxes : public testing::TestWithParam<int> {};

constexpr int64_t kMany = 100000;

std::vector<Box> many(int layout, Dims& shape) {
  std::vector<Box> boxes;
  switch (layout) {
    case 0:  // rows
      shape = {kMany * 2, 16};
      for (int64_t i = 0; i < kMany; ++i) boxes.push_back({{i * 2, 0}, {2, 16}});
      break;
    case 1:  // columns
      shape = {16, kMany * 2};
      for (int64_t i = 0; i < kMany; ++i) boxes.push_back({{0, i * 2}, {16, 2}});
      break;
    case 2:  // a grid
      shape = {400, 500};
      for (int64_t i = 0; i < kMany; ++i) boxes.push_back({{i / 250, i % 250 * 2}, {1, 2}});
      break;
    case 3:  // columns, each with cuts of its own: no slabs
      shape = {kMany * 2, 20};
      for (int64_t column = 0; column < 10; ++column) {
        for (int64_t i = 0, at = 0; at < shape[0]; ++i) {
          const int64_t length = std::min(shape[0] - at, i == 0 ? column + 1 : 20);
          boxes.push_back({{at, column * 2}, {length, 2}});
          at += length;
        }
      }
      break;
    default:  // one long column, and rows beside it
      shape = {kMany, 9};
      boxes.push_back({{0, 0}, {kMany, 1}});
      for (int64_t i = 1; i < kMany; ++i) boxes.push_back({{i, 1}, {1, 8}});
      boxes.push_back({{0, 1}, {1, 8}});
  }
  return boxes;
}

TEST_P(ManyBoxes, TakeNoSquareOfTheirNumber) {
  Dims shape;
  std::vector<Box> boxes = many(GetParam(), shape);
  const std::clock_t start = std::clock();
  EXPECT_TRUE(tiles(shape, boxes));
  Box& broken = boxes[boxes.size() / 2];
  for (size_t dim = 0; dim < 2; ++dim) {
    if (broken.offset[dim] == 0) continue;
    --broken.offset[dim];
    ++broken.size[dim];
    break;
  }
  EXPECT_TRUE(tiling(shape, boxes).overlap);
  // Comparing all pairs takes minutes. Of the processor's time: other load does not count.
  EXPECT_LT(std::clock() - start, 30 * CLOCKS_PER_SEC);
}

INSTANTIATE_TEST_SUITE_P(Tiling, ManyBoxes, testing::Range(0, 5));

TEST(Overlap, OfEqualBoxes) {
  const std::vector<int64_t> words = {0, 0, 2, 2, 0, 0, 2, 2};
  EXPECT_EQ(find_overlap({words.data(), 2}, 0, 2), std::pair(size_t{0}, size_t{1}));
  EXPECT_FALSE(find_overlap({words.data(), 2}, 0, 1));
  EXPECT_FALSE(find_overlap({words.data(), 2}, 1, 1));
}

}  // namespace
}  // namespace vescale_ckpt::plan
