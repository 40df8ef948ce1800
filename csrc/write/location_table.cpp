#include "write/location_table.h"

#include <algorithm>

#include "base/error.h"

namespace vescale_ckpt::write {

void LocationTable::add(const FileWriter& writer, std::span<const PlacedRecord> placed, std::span<const size_t> rows,
                        uint64_t first_file) {
  if (placed.size() != rows.size()) throw Error::invalid("expected a row of the plan for each record");
  if (rows.empty()) return;
  rows_.resize(std::max(rows_.size(), *std::ranges::max_element(rows) + 1));
  for (size_t at = 0; at < rows.size(); ++at) {
    const PlacedRecord& record = placed[at];
    rows_[rows[at]] = {static_cast<int64_t>(first_file + record.file), static_cast<int64_t>(record.offset),
                       static_cast<int64_t>(record.length), writer.checksums() ? int64_t{record.crc} : -1};
  }
}

std::pair<std::vector<LocationTable::Row>, std::vector<size_t>> LocationTable::in_used_files() const {
  std::vector<int64_t> numbers;  // by old number; at first 0 for files that hold a row, -1 for others
  for (const Row& row : rows_) {
    const auto file = static_cast<size_t>(row[0]);
    if (file >= numbers.size()) numbers.resize(file + 1, -1);
    numbers[file] = 0;
  }
  std::vector<size_t> used;
  for (size_t file = 0; file < numbers.size(); ++file) {
    if (numbers[file] < 0) continue;
    numbers[file] = static_cast<int64_t>(used.size());
    used.push_back(file);
  }
  std::vector<Row> rows = rows_;
  for (Row& row : rows) row[0] = numbers[static_cast<size_t>(row[0])];
  return {std::move(rows), std::move(used)};
}

}  // namespace vescale_ckpt::write
