#include "read/read_table.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>

#include "io/box_copy.h"
#include "tables.h"
#include "write/write_table.h"

namespace vescale_ckpt::read {
namespace {

using Table = std::vector<int64_t>;

TEST(WriteTable, HoldsTensors) {
  const Memory memory(1000);
  const int64_t at = address(memory);
  const int64_t float32 = code_of("float32");
  const int64_t int8 = code_of("int8");
  const Table table = {float32, at, 0,                       // a scalar
                       int8,    at, 2, 3, 4, 4, 1,           // contiguous
                       int8,    at, 2, 3, 4, 1, 3,           // transposed
                       int8,    at, 2, 3, 0, 7, 7,           // empty: contiguous whatever its strides
                       float32, at, 3, 1, 5, 1, 99, 1, 42};  // dimensions of one have any stride
  const std::vector<write::RecordSource> rows = write::parse_write_table(table);
  ASSERT_EQ(rows.size(), 5u);
  const uint64_t bytes[] = {4, 12, 12, 0, 20};
  for (size_t row = 0; row < rows.size(); ++row) {
    EXPECT_EQ(rows[row].data, memory.data());
    EXPECT_EQ(rows[row].bytes, bytes[row]) << row;
    EXPECT_EQ(rows[row].framing->body_bytes(), bytes[row]) << row;
    EXPECT_EQ(rows[row].strided.has_value(), row == 2) << row;
  }
  EXPECT_EQ(rows[1].framing, rows[2].framing);  // one for each dtype and shape
}

TEST(WriteTable, NamesTheRowThatMakesNoSense) {
  const Table good = {0, 0, 1, 3, 1};
  const auto with = [&](const Table& row) {
    Table table = good;
    table.insert(table.end(), row.begin(), row.end());
    return row_of_error([&] { write::parse_write_table(table); });
  };
  constexpr int64_t kHuge = int64_t{1} << 40;
  EXPECT_EQ(with({99, 0, 0}), 1);  // no such dtype
  EXPECT_EQ(with({-1, 0, 0}), 1);
  EXPECT_EQ(with({0, 0, -1}), 1);  // dimensions
  EXPECT_EQ(with({0, 0, kHuge, 1, 1}), 1);
  EXPECT_EQ(with({0, 0, 2, 3, 4, 1}), 1);  // ends inside the row
  EXPECT_EQ(with({0}), 1);
  EXPECT_EQ(with({0, 0, 1, -3, 1}), 1);                   // negative size
  EXPECT_EQ(with({0, 0, 2, kHuge, kHuge, kHuge, 1}), 1);  // overflow
}

TEST(ReadTable, HoldsBoxes) {
  const Memory memory(1000);
  const int64_t float32 = code_of("float32");
  const int64_t at = address(memory);
  const Table table = {7, 4096, 5000, 0xFFFFFFFF, float32, 2, 10, 20, 3, 5, 4, 6, at, 6, 1,  //
                       0, 0,    1600, -1,         float32, 0, at};
  const std::vector<ReadItem> items = parse_read_table(table);
  ASSERT_EQ(items.size(), 2u);
  EXPECT_EQ(items[0].file, 7u);
  EXPECT_EQ(items[0].record_offset, 4096u);
  EXPECT_EQ(items[0].record_length, 5000u);
  EXPECT_EQ(items[0].crc, 0xFFFFFFFF);
  EXPECT_EQ(items[0].dtype, dtype_code("float32"));
  EXPECT_EQ(items[0].chunk_sizes, (Sizes{10, 20}));
  EXPECT_EQ(items[0].memory, memory.data());
  EXPECT_EQ(items[0].box.bytes(), 4u * 6 * 4);
  EXPECT_EQ(items[0].box.begin(), (3u * 20 + 5) * 4);
  EXPECT_EQ(items[1].crc, kUnknownCrc);
  EXPECT_EQ(items[1].box.bytes(), 4u);
  EXPECT_TRUE(items[1].box.whole());
}

TEST(ReadTable, NamesTheRowThatMakesNoSense) {
  const auto with = [](const Table& row) {
    Table table = {0, 0, 1600, -1, 0, 0, 0};
    table.insert(table.end(), row.begin(), row.end());
    return row_of_error([&] { parse_read_table(table); });
  };
  constexpr int64_t kHuge = int64_t{1} << 40, kMost = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(with({-1, 0, 1600, -1, 0, 0, 0}), 1);                                 // file
  EXPECT_EQ(with({0, -1, 1600, -1, 0, 0, 0}), 1);                                 // offset
  EXPECT_EQ(with({0, 0, -1600, -1, 0, 0, 0}), 1);                                 // length
  EXPECT_EQ(with({0, 0, 1600, -1, 1000, 0, 0}), 1);                               // dtype
  EXPECT_EQ(with({0, 0, 1600, -1, 0, kMost, 0}), 1);                              // dimensions
  EXPECT_EQ(with({0, 0, 1600, -1, 0, 1, 5, 3, 3, 0, 1}), 1);                      // leaves its chunk
  EXPECT_EQ(with({0, 0, 1600, -1, 0, 1, -5, 0, 0, 0, 1}), 1);                     // negative size
  EXPECT_EQ(with({0, 0, 1600, -1, 0, 2, kHuge, kHuge, 0, 0, 1, 1, 0, 1, 1}), 1);  // overflow
  EXPECT_EQ(with({0, 0, 1600, -1, 0, 1, 5, 0, 5, 0}), 1);                         // ends inside the row
}

TEST(RangeTable, HoldsRanges) {
  const std::vector<ByteRange> ranges = parse_range_table(Table{1, 2, 3, 4, 5, 6});
  ASSERT_EQ(ranges.size(), 2u);
  EXPECT_EQ(ranges[1].file, 4u);
  EXPECT_EQ(ranges[1].offset, 5u);
  EXPECT_EQ(ranges[1].length, 6u);
  EXPECT_EQ(row_of_error([] { parse_range_table(Table{1, 2, 3, 4, -5, 6}); }), 1);
  EXPECT_EQ(row_of_error([] { parse_range_table(Table{1, 2, 3, 4}); }), 1);
}

// Whatever the numbers: rows come out or Error(invalid).
TEST(Tables, SurviveRandomNumbers) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 8000; ++round) {
    Table table(random() % 24);
    for (int64_t& value : table) {
      constexpr int64_t kOdd[] = {-1, std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max(),
                                  int64_t{1} << 33};
      value = random() % 20 == 0 ? kOdd[random() % 4] : static_cast<int64_t>(random() % 5);
    }
    for (const auto& parse :
         std::vector<std::function<void()>>{[&] { write::parse_write_table(table); }, [&] { parse_read_table(table); },
                                            [&] { parse_range_table(table); }}) {
      try {
        parse();
      } catch (const Error& error) {
        ASSERT_EQ(error.kind, Error::Kind::invalid) << error.what();
      }
    }
  }
}

}  // namespace
}  // namespace vescale_ckpt::read
