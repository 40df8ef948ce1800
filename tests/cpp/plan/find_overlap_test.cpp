#include "plan/validate.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace vescale_ckpt::plan {
namespace {

// Against comparing all pairs, with enough boxes for every step of the search and about as many that overlap as not.
TEST(Overlap, AgreesWithComparingAllPairs) {
  std::mt19937 random(3);
  const auto below = [&](int64_t limit) { return std::uniform_int_distribution<int64_t>(0, limit - 1)(random); };
  size_t found = 0;
  constexpr size_t kRounds = 1200;
  for (size_t round = 0; round < kRounds; ++round) {
    const auto ndim = static_cast<uint32_t>(1 + round % 4), count = static_cast<uint32_t>(20 + below(100));
    std::vector<int64_t> words;
    std::vector<int64_t> candidate(2 * ndim);
    const auto meets = [&](const int64_t* a, const int64_t* b) {
      for (uint32_t dim = 0; dim < ndim; ++dim) {
        if (a[dim] >= b[dim] + b[ndim + dim] || b[dim] >= a[dim] + a[ndim + dim]) return false;
      }
      return true;
    };
    // Long and short ones at random, kept if they are apart from those before; sometimes one more that may not be.
    const auto draw = [&] {
      for (uint32_t dim = 0; dim < ndim; ++dim) {
        candidate[dim] = below(64);
        candidate[ndim + dim] = 1 + (below(4) == 0 ? below(64) : below(4));
      }
    };
    const auto apart = [&] {
      for (size_t at = 0; at < words.size(); at += 2 * ndim) {
        if (meets(words.data() + at, candidate.data())) return false;
      }
      return true;
    };
    for (uint32_t tries = 0; tries < 4 * count; ++tries) {
      draw();
      if (apart()) words.insert(words.end(), candidate.begin(), candidate.end());
    }
    draw();
    bool expected = false;
    if (below(2) == 0) {
      expected = !apart();
      const auto place = static_cast<ptrdiff_t>(below(static_cast<int64_t>(words.size() / (2 * ndim)) + 1) * 2 * ndim);
      words.insert(words.begin() + place, candidate.begin(), candidate.end());
    }
    const Boxes boxes{words.data(), ndim};
    const auto result = find_overlap(boxes, 0, words.size() / (2 * ndim));
    ASSERT_EQ(result.has_value(), expected) << round;
    if (!result) continue;
    ++found;
    ASSERT_NE(result->first, result->second);
    ASSERT_TRUE(meets(boxes.offset(result->first), boxes.offset(result->second))) << round;
  }
  EXPECT_GT(found, kRounds / 10);
  EXPECT_LT(found, kRounds * 9 / 10);
}

TEST(Overlap, OfEqualBoxes) {
  const std::vector<int64_t> words = {0, 0, 2, 2, 0, 0, 2, 2};
  EXPECT_EQ(find_overlap({words.data(), 2}, 0, 2), std::pair(size_t{0}, size_t{1}));
  EXPECT_FALSE(find_overlap({words.data(), 2}, 0, 1));
  EXPECT_FALSE(find_overlap({words.data(), 2}, 1, 1));
}

}  // namespace
}  // namespace vescale_ckpt::plan
