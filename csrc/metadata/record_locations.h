// Where each record that the ranks wrote lies: file, offset, length and checksum. A catalog has no locations; with
// these it has all that a checkpoint's metadata says.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "metadata/catalog.h"

namespace vescale_ckpt::metadata {

struct RecordLocation {
  uint32_t file;  // index into RecordLocations::files
  uint64_t offset, length;
  int64_t crc;  // CRC-32, -1 for none
};

constexpr uint64_t kFarthest = uint64_t{1} << 62;  // no offset, length or size reaches it

// A view of the tables: they must outlive it. Immutable; thread-safe.
class RecordLocations {
 public:
  static constexpr size_t kWords = 4;

  // `tables[rank]` has a row for each row of the rank's local plan: file (index into `files[rank]`), offset, length,
  // crc. Throws Error (invalid).
  RecordLocations(std::vector<std::span<const int64_t>> tables, const std::vector<std::vector<std::string>>& files);

  // Throws Error (invalid) if the rank has no such row, or one whose numbers are out of bounds.
  RecordLocation operator[](const Catalog::Chunk& chunk) const;
  // Names of the files of all ranks, in the order of ranks, each once.
  const std::vector<std::string>& files() const { return files_; }

 private:
  std::vector<std::span<const int64_t>> tables_;
  std::vector<size_t> first_file_;      // in file_numbers_, of each rank, and one more
  std::vector<uint32_t> file_numbers_;  // of the files of all ranks, rank after rank
  std::vector<std::string> files_;
};

}  // namespace vescale_ckpt::metadata
