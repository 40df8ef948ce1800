// Gives the place of each record that the ranks wrote: file, offset, length and checksum. Catalog and locations
// together are the content of a checkpoint's metadata.
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

constexpr uint64_t kFarthest = uint64_t{1} << 62;  // every offset, length and size is less

// A view of the tables, which must outlive it. Thread-safe as long as nothing is dropped.
class RecordLocations {
 public:
  static constexpr size_t kWords = 4;

  // `tables[rank]` has a row for each row of the rank's local plan: file (index into `files[rank]`), offset, length,
  // crc. Throws Error (invalid).
  RecordLocations(std::vector<std::span<const int64_t>> tables, const std::vector<std::vector<std::string>>& files);

  // Forgets the files that no chunk of the catalog lies in: of copies on several nodes a catalog names one. Throws
  // Error (invalid).
  void drop_unnamed(const Catalog& catalog);

  // Writes the locations of the chunks to `out`. Each is a miss of the cache: those ahead are fetched meanwhile. Throws
  // as operator[].
  void gather(std::span<const Catalog::Chunk> chunks, RecordLocation* out) const;
  // Throws Error (invalid) if the rank has no such row, or if a number in the row is out of bounds.
  RecordLocation operator[](const Catalog::Chunk& chunk) const;
  // Returns the names of the files of all ranks, in the order of ranks, each once.
  const std::vector<std::string>& files() const { return files_; }

 private:
  std::vector<std::span<const int64_t>> tables_;
  std::vector<size_t> first_file_;      // start of each rank's files in file_numbers_, and the end
  std::vector<uint32_t> file_numbers_;  // index in files_ of the files of all ranks, rank after rank
  std::vector<std::string> files_;
};

}  // namespace vescale_ckpt::metadata
