// Where the ranks have put what they wrote: what a catalog lacks to be a checkpoint's metadata.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "metadata/catalog.h"

namespace vescale_ckpt::metadata {

struct Place {
  uint32_t file;  // index into Places::files
  uint64_t offset, length;
  int64_t crc;  // CRC-32, -1 for none
};

constexpr uint64_t kFarthest = uint64_t{1} << 62;  // no offset, length or size reaches it

// A view of the tables: they must outlive it. Immutable; thread-safe.
class Places {
 public:
  static constexpr size_t kWords = 4;

  // `tables[rank]` has a row for each row of the rank's part: file (index into `files[rank]`), offset, length, crc.
  // Throws Error (invalid).
  Places(std::vector<std::span<const int64_t>> tables, const std::vector<std::vector<std::string>>& files);

  // Throws Error (invalid) if the rank has no such row, or one that makes no sense.
  Place operator[](const Catalog::Chunk& chunk) const;
  // Of all ranks.
  const std::vector<std::string>& files() const { return files_; }

 private:
  std::vector<std::span<const int64_t>> tables_;
  std::vector<uint32_t> first_file_;  // of each rank, and one more
  std::vector<std::string> files_;
};

}  // namespace vescale_ckpt::metadata
