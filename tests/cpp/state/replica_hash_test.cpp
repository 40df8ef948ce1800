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
  // A chunk of each row: tensor, offset[2], size[2].
  std::vector<uint64_t> hashes(const std::vector<Words>& chunks, uint32_t elements = 8, uint8_t ready = kOnHost) const {
    InventoryBuilder builder;
    Words sources, words = table();
    for (const Words& chunk : chunks) {
      const std::span<const int64_t> all = chunk;
      const Words shape = {100, 100};
      Item item{"a",
                ItemKind::shard,
                static_cast<uint8_t>(code_of("int16")),
                0,
                0,
                shape,
                all.subspan(1, 2),
                all.subspan(3, 2)};
      item.bytes = static_cast<uint64_t>(2 * chunk[3] * chunk[4]);
      builder.add(item);
      sources.insert(sources.end(), {chunk[0], 2, chunk[1], chunk[2]});
    }
    const std::vector<std::byte> packed = builder.pack();
    const Inventory inventory{packed};
    std::vector<uint32_t> items(chunks.size());
    std::iota(items.begin(), items.end(), 0u);
    const std::vector<std::byte> flags(2, std::byte{ready});
    return replica_hashes({inventory, sources, words, flags}, items, {elements, 2, 30}, kFactors);
  }
};

TEST(ReplicaHash, IsTheSameHoweverElementsLie) {
  const Matrix matrix;
  const auto whole = matrix.hashes({{0, 0, 0, 4, 6}, {1, 0, 0, 4, 6}});
  EXPECT_EQ(whole[0], whole[1]);
  const auto chunk = matrix.hashes({{0, 1, 2, 3, 2}, {1, 1, 2, 3, 2}});
  EXPECT_EQ(chunk[0], chunk[1]);
  EXPECT_NE(chunk[0], whole[0]);
}

TEST(ReplicaHash, AddsElementsTimesFactors) {
  const Matrix matrix;  // elements 3, 4 of row 1: 4 and 5
  EXPECT_EQ(matrix.hashes({{0, 1, 3, 1, 2}}), (std::vector<uint64_t>{4 * 3 + 5 * 5}));
  EXPECT_EQ(matrix.hashes({{0, 1, 3, 1, 2}}, 1), (std::vector<uint64_t>{4 * 3}));
  // 48 bytes are a large chunk, of which two elements count: those at 6 and 18
  EXPECT_EQ(matrix.hashes({{0, 0, 0, 4, 6}}), (std::vector<uint64_t>{1 * 3 + 13 * 5}));
  EXPECT_EQ(matrix.hashes({{0, 0, 5, 1, 1}}), (std::vector<uint64_t>{1}));  // 0 would be no hash
}

TEST(ReplicaHash, LeavesOutWhatTheEngineMayNotRead) {
  const Matrix matrix;
  EXPECT_EQ(matrix.hashes({{0, 0, 0, 4, 6}}, 8, kNotReady), (std::vector<uint64_t>{kNotHashed}));
  EXPECT_EQ(matrix.hashes({{0, 0, 0, 4, 6}}, 8, kOnDevice), (std::vector<uint64_t>{kNotHashed}));
}

TEST(ReplicaHash, RefusesItemsThatDoNotFit) {
  const Matrix matrix;
  EXPECT_THROW(matrix.hashes({{0, 0, 0, 5, 1}}), Error);
  EXPECT_THROW(matrix.hashes({{0, 3, 0, 2, 1}}), Error);
  EXPECT_THROW(matrix.hashes({{0, 0, 0, 2, 5}}, 9), Error);  // more than there are factors
}

}  // namespace
}  // namespace vescale_ckpt::state
