#include "format/checksum_table.h"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <random>

#include "base/crc32.h"
#include "format/golden.h"

namespace vescale_ckpt::format {
namespace {

constexpr uint64_t kMiB = 1 << 20;
constexpr uint64_t kTableOffset = 64 * kMiB;

struct Record {
  uint64_t offset, body_offset, body_bytes;
  uint32_t crc;
  std::vector<uint32_t> blocks;
};

std::vector<Record> records() {
  std::vector<Record> records;
  std::mt19937 random(1);
  for (const auto& [offset, bytes] : std::vector<std::pair<uint64_t, uint64_t>>{
           {0, 0}, {2048, 5}, {8192, kChecksumBlock}, {kMiB, 3 * kMiB + 1}, {5 * kMiB, 50 * kMiB}}) {
    Record record{offset, offset + 704, bytes, static_cast<uint32_t>(random()), {}};
    record.blocks.resize(cells(record.body_offset, record.body_offset + bytes));
    for (uint32_t& block : record.blocks) block = static_cast<uint32_t>(random());
    records.push_back(record);
  }
  return records;
}

ChecksumTable table_of(const std::vector<Record>& records) {
  ChecksumTable table;
  for (const Record& record : records) {
    table.add(record.offset, record.body_offset, record.body_bytes, record.crc, record.blocks);
  }
  return table;
}

// The table at the end of a file, from memory that ends where the text does.
std::optional<ChecksumTable> parse(std::string_view text, uint64_t table_offset = kTableOffset) {
  if (text.size() < ChecksumTable::kFooterBytes) return std::nullopt;
  const std::vector<char> exact(text.begin(), text.end());
  const auto bytes = view({exact.data(), exact.size()});
  const auto footer = ChecksumTable::parse_footer(bytes.last(ChecksumTable::kFooterBytes), table_offset + text.size());
  if (!footer) return std::nullopt;
  if (footer->table_bytes > bytes.size() - ChecksumTable::kFooterBytes) return std::nullopt;
  return ChecksumTable::parse(bytes.first(bytes.size() - ChecksumTable::kFooterBytes).last(footer->table_bytes),
                              *footer);
}

void expect_equal(const ChecksumTable& table, const std::vector<Record>& records) {
  for (const Record& record : records) {
    const ChecksumTable::Row* row = table.find(record.offset);
    ASSERT_NE(row, nullptr) << record.offset;
    EXPECT_EQ(row->body_offset, record.body_offset);
    EXPECT_EQ(row->body_bytes, record.body_bytes);
    EXPECT_EQ(row->crc, record.crc);
    const auto blocks = table.blocks(*row);
    EXPECT_EQ(std::vector<uint32_t>(blocks.begin(), blocks.end()), record.blocks);
  }
}

// Makes the footer say what it should of a changed table, so that the table itself is looked at.
std::string resealed(std::string text) {
  const size_t footer = text.size() - ChecksumTable::kFooterBytes;
  const uint32_t table_crc = crc32(0, text.data(), footer);
  std::memcpy(text.data() + footer + 40, &table_crc, sizeof table_crc);
  const uint32_t footer_crc = crc32(0, text.data() + footer, 60);
  std::memcpy(text.data() + footer + 60, &footer_crc, sizeof footer_crc);
  return text;
}

TEST(Cells, AreTouchedByARange) {
  EXPECT_EQ(cells(0, 0), 0u);
  EXPECT_EQ(cells(5, 5), 0u);
  EXPECT_EQ(cells(0, 1), 1u);
  EXPECT_EQ(cells(0, kChecksumBlock), 1u);
  EXPECT_EQ(cells(0, kChecksumBlock + 1), 2u);
  EXPECT_EQ(cells(kChecksumBlock - 1, kChecksumBlock + 1), 2u);
  EXPECT_EQ(cells(kChecksumBlock, 2 * kChecksumBlock), 1u);
}

TEST(ChecksumTable, SurvivesTheTripThroughAFile) {
  const std::vector<Record> rows = records();
  const ChecksumTable table = table_of(rows);
  expect_equal(table, rows);
  const auto parsed = parse(table.serialize(kTableOffset));
  ASSERT_TRUE(parsed);
  expect_equal(*parsed, rows);
  EXPECT_EQ(parsed->find(1), nullptr);
  EXPECT_EQ(parsed->find(std::numeric_limits<uint64_t>::max()), nullptr);
}

TEST(ChecksumTable, MayBeEmpty) {
  const auto parsed = parse(ChecksumTable().serialize(0), 0);
  ASSERT_TRUE(parsed);
  EXPECT_EQ(parsed->find(0), nullptr);
}

TEST(ChecksumTable, BelongsToItsFile) {
  const std::string text = table_of(records()).serialize(kTableOffset);
  EXPECT_FALSE(parse(text, kTableOffset + 1));  // something was put before it
  EXPECT_FALSE(parse(text, kTableOffset - 1));
  EXPECT_FALSE(parse(text + std::string(64, '\0')));  // or behind it
  EXPECT_FALSE(ChecksumTable::parse_footer(view(text).last(ChecksumTable::kFooterBytes), 10));
  EXPECT_FALSE(ChecksumTable::parse_footer(view(text).last(ChecksumTable::kFooterBytes - 1), kTableOffset));
}

TEST(ChecksumTable, IsNotThereAtAnyOtherLength) {
  const std::string text = table_of(records()).serialize(kTableOffset);
  for (size_t length = 0; length < text.size(); ++length) {
    ASSERT_FALSE(parse(text.substr(0, length))) << length;
    ASSERT_FALSE(parse(text.substr(text.size() - length), kTableOffset)) << length;
  }
}

TEST(ChecksumTable, IsNotThereWithAnyBitChanged) {
  for (const ChecksumTable& table : {ChecksumTable(), table_of(records())}) {
    const std::string good = table.serialize(kTableOffset);
    for (size_t at = 0; at < good.size(); ++at) {
      std::string bad = good;
      bad[at] = static_cast<char>(bad[at] ^ (1 << (at * 5 % 8)));
      ASSERT_FALSE(parse(bad)) << at;
    }
  }
}

// A table whose checksums are right but whose numbers lie: refused, or harmless to use.
TEST(ChecksumTable, SurvivesLyingNumbers) {
  const std::string good = table_of(records()).serialize(kTableOffset);
  const size_t numbers = 16 + records().size() * sizeof(ChecksumTable::Row);  // counts and rows
  std::mt19937_64 random(2);
  const uint64_t odd[] = {0, 1, ~uint64_t{0}, uint64_t{1} << 63, kTableOffset, kTableOffset + 1, uint64_t{1} << 40};
  for (int round = 0; round < 20000; ++round) {
    std::string bad = good;
    for (unsigned changes = 1 + random() % 3; changes != 0; --changes) {
      const uint64_t value = random() % 2 == 0 ? odd[random() % std::size(odd)] : random() >> (random() % 64);
      std::memcpy(bad.data() + random() % (numbers / 8) * 8, &value, sizeof value);
    }
    const auto table = parse(resealed(bad));
    if (!table) continue;
    uint64_t sum = 0;
    for (const Record& record : records()) {
      const ChecksumTable::Row* row = table->find(record.offset);
      if (row == nullptr) continue;
      ASSERT_LE(row->body_offset + row->body_bytes, kTableOffset);
      ASSERT_EQ(table->blocks(*row).size(), cells(row->body_offset, row->body_offset + row->body_bytes));
      for (const uint32_t block : table->blocks(*row)) sum += block;
    }
    ASSERT_GE(sum, 0u);
  }
}

}  // namespace
}  // namespace vescale_ckpt::format
