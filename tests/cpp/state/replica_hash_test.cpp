#include "state/replica_hash.h"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <numeric>

#include "tables.h"

namespace vescale_ckpt::state {
namespace {

using Words = std::vector<int64_t>;

constexpr std::array<uint64_t, 8> kFactors = {3, 5, 7, 11, 13, 17, 19, 23};

struct Matrix {
  std::array<int16_t, 24> rows{}, columns{};  // [4, 6], and the same transposed in memory

  Matrix() {
    std::iota(rows.begin(), rows.end(), int16_t{-5});
    for (size_t i = 0; i < 4; ++i) {
      for (size_t j = 0; j < 6; ++j) columns[j * 4 + i] = rows[i * 6 + j];
    }
  }
  Words table() const {
    const auto address = [](const auto& values) { return std::bit_cast<int64_t>(values.data()); };
    return {address(rows),    code_of("int16"), kHostDevice, 2, 4, 6, 6, 1,
            address(columns), code_of("int16"), kHostDevice, 2, 4, 6, 1, 4};
  }
  std::vector<uint64_t> hashes(const Words& boxes, uint32_t elements = 8) const {
    const Words words = table();
    return replica_hashes(TensorTable(words), boxes, elements, kFactors);
  }
};

TEST(ReplicaHash, IsTheSameHoweverElementsLie) {
  const Matrix matrix;
  const auto whole = matrix.hashes({0, 2, 0, 0, 4, 6, 1, 2, 0, 0, 4, 6});
  EXPECT_EQ(whole[0], whole[1]);
  const auto box = matrix.hashes({0, 2, 1, 2, 3, 2, 1, 2, 1, 2, 3, 2});
  EXPECT_EQ(box[0], box[1]);
  EXPECT_NE(box[0], whole[0]);
}

TEST(ReplicaHash, AddsElementsTimesFactors) {
  const Matrix matrix;  // elements 3, 4 of row 1: 4 and 5
  EXPECT_EQ(matrix.hashes({0, 2, 1, 3, 1, 2}), (std::vector<uint64_t>{4 * 3 + 5 * 5}));
  EXPECT_EQ(matrix.hashes({0, 2, 0, 0, 4, 6}, 1).size(), 1u);
}

TEST(ReplicaHash, RefusesRowsThatDoNotFit) {
  const Matrix matrix;
  for (const Words& boxes : {Words{0}, Words{2, 2, 0, 0, 1, 1}, Words{-1, 2, 0, 0, 1, 1}, Words{0, 1, 0, 1},
                             Words{0, 2, 0, 0, 1}, Words{0, 2, 0, 0, 5, 1}, Words{0, 2, -1, 0, 1, 1},
                             Words{0, 2, 3, 0, 2, 1}, Words{0, 2, 0, 0, 0, 1}, Words{0, 2, INT64_MAX, 0, 2, 1}}) {
    EXPECT_THROW(matrix.hashes(boxes), Error);
  }
  EXPECT_THROW(matrix.hashes({0, 2, 0, 0, 4, 6}, 9), Error);  // more than there are factors
}

}  // namespace
}  // namespace vescale_ckpt::state
