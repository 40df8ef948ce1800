#include "plan/messages.h"

#include <gtest/gtest.h>

namespace vescale_ckpt::plan {
namespace {

std::string ranks(std::vector<uint32_t> list) {
  return ranks_text(list);
}

TEST(Messages, Tuples) {
  EXPECT_EQ(tuple_text({}), "()");
  EXPECT_EQ(tuple_text(std::vector<int64_t>{7}), "(7,)");
  EXPECT_EQ(tuple_text(std::vector<int64_t>{4, -8}), "(4, -8)");
}

TEST(Messages, RanksAsRanges) {
  EXPECT_EQ(ranks({3}), "rank 3");
  EXPECT_EQ(ranks({3, 4}), "ranks 3, 4");
  EXPECT_EQ(ranks({0, 1, 2}), "ranks 0-2");
  EXPECT_EQ(ranks({3, 5, 6, 7}), "ranks 3, 5-7");
  EXPECT_EQ(ranks({0, 2, 4, 6, 8, 10, 12, 14}), "ranks 0, 2, 4, 6, 8, 10, 12, 14");
  EXPECT_EQ(ranks({0, 2, 4, 6, 8, 10, 12, 14, 16}), "ranks 0, 2, 4, 6, 8, 10, 12, 14, ... (9 in all)");
}

TEST(Messages, WhoHasWhat) {
  using Values = std::vector<std::pair<std::string, std::vector<uint32_t>>>;
  EXPECT_EQ(disagreement_text("shape", Values{{"(4, 8)", {0}}, {"(4, 16)", {3, 5, 6, 7}}}),
            "rank 0 has shape (4, 8), ranks 3, 5-7 have (4, 16)");
  Values many;
  for (uint32_t i = 0; i < 10; ++i) many.emplace_back(std::to_string(i), std::vector{i});
  EXPECT_TRUE(disagreement_text("dtype", many).ends_with("rank 7 has 7, and 2 more values"));
}

}  // namespace
}  // namespace vescale_ckpt::plan
