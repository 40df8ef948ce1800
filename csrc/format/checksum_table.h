// Reads and writes the checksums of blocks at the end of a data file, so that reads of a part of a tensor can be
// verified. Stock readers do not read them. docs/format.md has the exact layout.
//
// The file is divided into cells of kChecksumBlock bytes. A block is the part of a tensor's bytes in one cell, so that
// blocks and aligned reads have the same borders.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace vescale_ckpt::format {

inline constexpr uint64_t kChecksumBlock = 256 << 10;

// Returns the number of cells that the file range [begin, end) touches.
constexpr uint64_t cells(uint64_t begin, uint64_t end) {
  return begin >= end ? 0 : (end - 1) / kChecksumBlock - begin / kChecksumBlock + 1;
}

// Returns the checksum of a tensor in [begin, end) of a file from the checksums of all its blocks.
uint32_t joined_crc(uint64_t begin, uint64_t end, std::span<const uint32_t> blocks);

class ChecksumTable {
 public:
  struct Row {
    uint64_t record_offset;  // offset in the file, as in .metadata
    uint64_t body_offset;    // offset in the file
    uint64_t body_bytes;
    uint64_t first_block;  // index into the blocks
    uint32_t crc;          // CRC-32 of the body
    uint32_t reserved;
  };
  static constexpr uint64_t kFooterBytes = 64;

  // Add rows in ascending order of record_offset.
  void add(uint64_t record_offset, uint64_t body_offset, uint64_t body_bytes, uint32_t crc,
           std::span<const uint32_t> blocks);

  // Returns table and footer, which end the file. The table starts at `offset`.
  std::string serialize(uint64_t offset) const;

  struct Footer {
    uint64_t table_offset, table_bytes;
    uint32_t table_crc;
  };
  // Returns nullopt if the last bytes of a file are no sound footer: then the file has no table.
  static std::optional<Footer> parse_footer(std::span<const std::byte> last, uint64_t file_bytes);
  static std::optional<ChecksumTable> parse(std::span<const std::byte> bytes, const Footer& footer);

  std::span<const Row> rows() const { return rows_; }
  const Row* find(uint64_t record_offset) const;
  std::span<const uint32_t> blocks(const Row& row) const;

 private:
  std::vector<Row> rows_;
  std::vector<uint32_t> blocks_;
};

}  // namespace vescale_ckpt::format
