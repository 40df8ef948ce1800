#include "base/numbered_strings.h"

#include <gtest/gtest.h>

#include <string>

namespace vescale_ckpt {
namespace {

TEST(NumberedStrings, NumbersInOrderOfFirstAppearance) {
  NumberedStrings names;
  EXPECT_EQ(names.add("b"), std::pair(0u, true));
  EXPECT_EQ(names.add(""), std::pair(1u, true));
  EXPECT_EQ(names.add("a"), std::pair(2u, true));
  EXPECT_EQ(names.add("b"), std::pair(0u, false));
  EXPECT_EQ(names.add(""), std::pair(1u, false));
  EXPECT_EQ(names.size(), 3u);
  EXPECT_EQ(names[0], "b");
  EXPECT_EQ(names[1], "");
  EXPECT_EQ(names.find("a"), 2u);
  EXPECT_EQ(names.find("ab"), std::nullopt);
  EXPECT_EQ(names.text(), "ba");
}

TEST(NumberedStrings, Grow) {
  NumberedStrings names;
  for (uint32_t i = 0; i < 10000; ++i) EXPECT_EQ(names.add(std::to_string(i)), std::pair(i, true));
  for (uint32_t i = 0; i < 10000; ++i) {
    EXPECT_EQ(names.find(std::to_string(i)), i);
    EXPECT_EQ(names[i], std::to_string(i));
  }
}

}  // namespace
}  // namespace vescale_ckpt
