#include "base/large_vector.h"

#include <gtest/gtest.h>

#include <numeric>

namespace vescale_ckpt {
namespace {

TEST(LargeVector, IsAVector) {
  for (const size_t count : {size_t{1}, size_t{1000}, size_t{3} << 20}) {
    LargeVector<int64_t> values;
    values.resize(count);
    std::iota(values.begin(), values.end(), int64_t{5});
    LargeVector<int64_t> moved = std::move(values);
    moved.push_back(-1);
    moved.resize(count / 2 + 1);
    moved.shrink_to_fit();
    ASSERT_EQ(moved.size(), count / 2 + 1);
    EXPECT_EQ(moved.back(), static_cast<int64_t>(count / 2 + 5));
  }
}

TEST(LargeVector, LargeOnesStartOnAHugePage) {
  LargeVector<int64_t> values;
  values.resize(size_t{1} << 20);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(values.data()) % (size_t{2} << 20), 0u);
}

TEST(LargeVector, TooMuchIsBadAlloc) {
  LargeVector<int64_t> values;
  EXPECT_THROW(values.reserve(size_t{1} << 50), std::bad_alloc);
  EXPECT_THROW(LargeAllocator<int64_t>().allocate(SIZE_MAX / 8 + 1), std::bad_array_new_length);
}

}  // namespace
}  // namespace vescale_ckpt
