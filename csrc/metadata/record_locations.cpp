#include "metadata/record_locations.h"

#include <string_view>
#include <unordered_map>
#include <utility>

#include "base/error.h"

namespace vescale_ckpt::metadata {
namespace {

[[noreturn]] void malformed(size_t rank, const char* what) {
  throw Error::invalid("what rank " + std::to_string(rank) + " says that it wrote is malformed: " + what);
}

}  // namespace

RecordLocations::RecordLocations(std::vector<std::span<const int64_t>> tables,
                                 const std::vector<std::vector<std::string>>& files)
    : tables_(std::move(tables)) {
  if (files.size() != tables_.size()) throw Error::invalid("expected as many lists of files as ranks");
  std::unordered_map<std::string_view, uint32_t> numbers;
  for (size_t rank = 0; rank < files.size(); ++rank) {
    if (tables_[rank].size() % kWords != 0) malformed(rank, "not whole rows");
    first_file_.push_back(file_numbers_.size());
    for (const std::string& name : files[rank]) {  // ranks may name the same file
      const auto [found, is_new] = numbers.emplace(name, static_cast<uint32_t>(files_.size()));
      if (is_new) files_.push_back(name);
      file_numbers_.push_back(found->second);
    }
  }
  if (files_.size() >= INT32_MAX) throw Error::invalid("too many files");
  first_file_.push_back(file_numbers_.size());
}

void RecordLocations::drop_unnamed(const Catalog& catalog) {
  std::vector<uint32_t> number(files_.size(), UINT32_MAX);
  size_t rows = 0;
  for (const auto& table : tables_) rows += table.size() / kWords;
  if (rows == catalog.chunks.size()) {  // every row is of a chunk: the tables are read in their order
    for (uint32_t rank = 0; rank < tables_.size(); ++rank) {
      for (uint32_t row = 0; row < tables_[rank].size() / kWords; ++row) number[(*this)[{0, rank, row}].file] = 0;
    }
  } else {
    for (const Catalog::Chunk& chunk : catalog.chunks) number[(*this)[chunk].file] = 0;
  }
  uint32_t kept = 0;
  for (size_t file = 0; file < files_.size(); ++file) {
    if (number[file] == UINT32_MAX) continue;
    if (kept != file) files_[kept] = std::move(files_[file]);
    number[file] = kept++;
  }
  files_.resize(kept);
  for (uint32_t& file : file_numbers_) file = number[file];
}

void RecordLocations::gather(std::span<const Catalog::Chunk> chunks, RecordLocation* out) const {
  constexpr size_t kAhead = 32;
  for (size_t i = 0; i < chunks.size(); ++i) {
    if (i + kAhead < chunks.size()) {
      const Catalog::Chunk& later = chunks[i + kAhead];
      if (later.writer < tables_.size()) __builtin_prefetch(tables_[later.writer].data() + size_t{later.row} * kWords);
    }
    out[i] = (*this)[chunks[i]];
  }
}

RecordLocation RecordLocations::operator[](const Catalog::Chunk& chunk) const {
  const size_t rank = chunk.writer;
  if (rank >= tables_.size()) throw Error::invalid("nothing is known of what rank " + std::to_string(rank) + " wrote");
  if (chunk.row >= tables_[rank].size() / kWords) malformed(rank, "it misses a row");
  const auto row = tables_[rank].subspan(size_t{chunk.row} * kWords, kWords);
  if (row[0] < 0 || static_cast<uint64_t>(row[0]) >= first_file_[rank + 1] - first_file_[rank])
    malformed(rank, "a file without a name");
  for (const int64_t number : {row[1], row[2]}) {
    if (number < 0 || static_cast<uint64_t>(number) >= kFarthest) malformed(rank, "an absurd offset or length");
  }
  if (row[3] < -1 || row[3] > UINT32_MAX) malformed(rank, "a checksum that is none");
  return {file_numbers_[first_file_[rank] + static_cast<size_t>(row[0])], static_cast<uint64_t>(row[1]),
          static_cast<uint64_t>(row[2]), row[3]};
}

}  // namespace vescale_ckpt::metadata
