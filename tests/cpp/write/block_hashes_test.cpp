#include "write/block_hashes.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <vector>

#include "base/crc32.h"
#include "base/error.h"
#include "write/write_table.h"

namespace vescale_ckpt::write {
namespace {

struct Keyed {
  std::vector<uint64_t> key = std::vector<uint64_t>(kHashKeyWords);
  io::EngineOptions options;
  Keyed() {
    std::mt19937_64 random(7);
    for (uint64_t& word : key) word = random();
    options.threads = 3;
  }
  TensorHashes of(const RecordSource& tensor) const { return hash_tensors({&tensor, 1}, key, options)[0]; }
};

RecordSource plain(const std::vector<std::byte>& bytes, size_t count) {
  RecordSource source;
  source.data = bytes.data();
  source.bytes = count;
  return source;
}

std::vector<std::byte> random_bytes(size_t count) {
  std::mt19937 random(1);
  std::vector<std::byte> bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

TEST(BlockHashes, HaveFourWordsABlockAndTheChecksum) {
  const Keyed keyed;
  const std::vector<std::byte> bytes = random_bytes(600'000);
  for (const size_t count : {0, 1, 8191, 8192, 8193, 262'144, 262'145, 600'000}) {
    const TensorHashes hashes = keyed.of(plain(bytes, count));
    EXPECT_EQ(hashes.blocks.size(), 4 * ((count + kHashedBlock - 1) / kHashedBlock));
    EXPECT_EQ(hashes.crc, crc32(0, bytes.data(), count));
  }
}

TEST(BlockHashes, DifferWhereABitDoesAndNowhereElse) {
  const Keyed keyed;
  std::vector<std::byte> bytes = random_bytes(300'000);
  const TensorHashes before = keyed.of(plain(bytes, bytes.size()));
  for (const size_t at : {0, 8191, 8192, 262'143, 262'144, 299'999}) {
    bytes[at] ^= std::byte{1};
    const TensorHashes after = keyed.of(plain(bytes, bytes.size()));
    bytes[at] ^= std::byte{1};
    for (size_t word = 0; word < before.blocks.size(); word += 4) {
      const bool changed = word / 4 == at / kHashedBlock;
      EXPECT_EQ(before.blocks[word] != after.blocks[word] || before.blocks[word + 1] != after.blocks[word + 1],
                changed);
      EXPECT_EQ(before.blocks[word + 2] != after.blocks[word + 2] || before.blocks[word + 3] != after.blocks[word + 3],
                changed);
    }
  }
}

TEST(BlockHashes, AreThoseOfTheBytesInOrderForAnyStrides) {
  const Keyed keyed;
  const int64_t rows = 300, columns = 500;
  std::vector<int32_t> values(static_cast<size_t>(rows * columns)), transposed(values.size());
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<int32_t>(i * 2'654'435'761U);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < columns; ++column) {
      transposed[static_cast<size_t>(column * rows + row)] = values[static_cast<size_t>(row * columns + column)];
    }
  }
  int64_t int32 = 0;
  while (format::dtypes()[static_cast<size_t>(int32)].name != "int32") ++int32;
  const auto address = [](const std::vector<int32_t>& of) {
    return static_cast<int64_t>(reinterpret_cast<uintptr_t>(of.data()));
  };
  const std::vector<int64_t> table = {int32, address(values),     2, columns, rows, 1,    columns,
                                      int32, address(transposed), 2, columns, rows, rows, 1};
  const std::vector<TensorHashes> hashes = hash_tensors(parse_write_table(table), keyed.key, keyed.options);
  EXPECT_EQ(hashes[0].blocks, hashes[1].blocks);
  EXPECT_EQ(hashes[0].crc, hashes[1].crc);
}

TEST(BlockHashes, NeedAWholeKey) {
  const Keyed keyed;
  const std::vector<std::byte> bytes(10);
  const RecordSource source = plain(bytes, 10);
  EXPECT_THROW(hash_tensors({&source, 1}, std::span(keyed.key).first(5), keyed.options), Error);
}

}  // namespace
}  // namespace vescale_ckpt::write
