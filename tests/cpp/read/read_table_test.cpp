#include "read/reader.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>

#include "error_of.h"
#include "io/box.h"
#include "write/writer.h"

namespace vescale_ckpt::read {
namespace {

using Table = std::vector<int64_t>;

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
    for (const auto& parse : std::vector<std::function<void()>>{[&] { write::parse_write_table(table); },
                                                                [&] { parse_read_table(table); }}) {
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
