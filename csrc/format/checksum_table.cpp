#include "format/checksum_table.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "base/crc32.h"

namespace vescale_ckpt::format {
namespace {

constexpr char kMagic[8] = {'V', 'S', 'C', 'K', 'S', 'U', 'M', '1'};

struct RawFooter {
  char magic[8];
  uint64_t file_bytes;
  uint64_t table_offset;
  uint64_t table_bytes;
  uint64_t block_bytes;
  uint32_t table_crc;
  uint32_t reserved[4];
  uint32_t footer_crc;  // CRC-32 of all bytes before it
};
static_assert(sizeof(RawFooter) == ChecksumTable::kFooterBytes);

struct RawCounts {
  uint64_t rows;
  uint64_t blocks;
};

static_assert(sizeof(ChecksumTable::Row) == 40 && std::is_trivially_copyable_v<ChecksumTable::Row>);

}  // namespace

uint32_t joined_crc(uint64_t begin, uint64_t end, std::span<const uint32_t> blocks) {
  uint32_t crc = 0;
  uint64_t at = begin;
  for (const uint32_t block : blocks) {
    const uint64_t next = std::min(end, (at / kChecksumBlock + 1) * kChecksumBlock);
    crc = crc32_combine(crc, block, next - at);
    at = next;
  }
  return crc;
}

void ChecksumTable::add(uint64_t record_offset, uint64_t body_offset, uint64_t body_bytes, uint32_t crc,
                        std::span<const uint32_t> blocks) {
  rows_.push_back({record_offset, body_offset, body_bytes, blocks_.size(), crc, 0});
  blocks_.insert(blocks_.end(), blocks.begin(), blocks.end());
}

std::string ChecksumTable::serialize(uint64_t offset) const {
  const RawCounts counts{rows_.size(), blocks_.size()};
  std::string text(reinterpret_cast<const char*>(&counts), sizeof counts);
  text.append(reinterpret_cast<const char*>(rows_.data()), rows_.size() * sizeof(Row));
  text.append(reinterpret_cast<const char*>(blocks_.data()), blocks_.size() * sizeof(uint32_t));
  RawFooter footer{};
  std::memcpy(footer.magic, kMagic, sizeof kMagic);
  footer.file_bytes = offset + text.size() + sizeof footer;
  footer.table_offset = offset;
  footer.table_bytes = text.size();
  footer.block_bytes = kChecksumBlock;
  footer.table_crc = crc32(0, text.data(), text.size());
  footer.footer_crc = crc32(0, &footer, offsetof(RawFooter, footer_crc));
  text.append(reinterpret_cast<const char*>(&footer), sizeof footer);
  return text;
}

std::optional<ChecksumTable::Footer> ChecksumTable::parse_footer(std::span<const std::byte> last, uint64_t file_bytes) {
  RawFooter footer;
  if (last.size() != sizeof footer || file_bytes < sizeof footer) return std::nullopt;
  std::memcpy(&footer, last.data(), sizeof footer);
  if (std::memcmp(footer.magic, kMagic, sizeof kMagic) != 0) return std::nullopt;
  if (footer.footer_crc != crc32(0, &footer, offsetof(RawFooter, footer_crc))) return std::nullopt;
  const uint64_t before = file_bytes - sizeof footer;
  if (footer.file_bytes != file_bytes || footer.block_bytes != kChecksumBlock || footer.table_bytes > before ||
      footer.table_bytes > footer.table_offset / 8 + 4096 || footer.table_offset != before - footer.table_bytes) {
    return std::nullopt;
  }
  return Footer{footer.table_offset, footer.table_bytes, footer.table_crc};
}

std::optional<ChecksumTable> ChecksumTable::parse(std::span<const std::byte> bytes, const Footer& footer) {
  RawCounts counts;
  if (bytes.size() != footer.table_bytes || bytes.size() < sizeof counts) return std::nullopt;
  if (crc32(0, bytes.data(), bytes.size()) != footer.table_crc) return std::nullopt;
  std::memcpy(&counts, bytes.data(), sizeof counts);
  const uint64_t rest = bytes.size() - sizeof counts;
  if (counts.rows > rest / sizeof(Row) || counts.blocks > rest / sizeof(uint32_t) ||
      rest != counts.rows * sizeof(Row) + counts.blocks * sizeof(uint32_t)) {
    return std::nullopt;
  }
  ChecksumTable table;
  table.rows_.resize(counts.rows);
  table.blocks_.resize(counts.blocks);
  const std::byte* at = bytes.data() + sizeof counts;
  if (counts.rows != 0) std::memcpy(table.rows_.data(), at, counts.rows * sizeof(Row));
  if (counts.blocks != 0) {
    std::memcpy(table.blocks_.data(), at + counts.rows * sizeof(Row), counts.blocks * sizeof(uint32_t));
  }
  for (const Row& row : table.rows_) {
    if (row.body_offset > footer.table_offset || row.body_bytes > footer.table_offset - row.body_offset)
      return std::nullopt;
    const uint64_t blocks = cells(row.body_offset, row.body_offset + row.body_bytes);
    if (row.first_block > counts.blocks || blocks > counts.blocks - row.first_block) return std::nullopt;
  }
  return table;
}

const ChecksumTable::Row* ChecksumTable::find(uint64_t record_offset) const {
  const auto found = std::lower_bound(rows_.begin(), rows_.end(), record_offset,
                                      [](const Row& row, uint64_t offset) { return row.record_offset < offset; });
  return found != rows_.end() && found->record_offset == record_offset ? &*found : nullptr;
}

std::span<const uint32_t> ChecksumTable::blocks(const Row& row) const {
  return std::span(blocks_).subspan(row.first_block, cells(row.body_offset, row.body_offset + row.body_bytes));
}

}  // namespace vescale_ckpt::format
