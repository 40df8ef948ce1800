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

std::pair<std::vector<LocationTable::Row>, std::vector<int64_t>> LocationTable::in_used_files() const {
  std::vector<int64_t> used;
  for (const Row& row : rows_) used.push_back(row[0]);
  std::ranges::sort(used);
  used.erase(std::unique(used.begin(), used.end()), used.end());
  std::vector<Row> rows = rows_;
  for (Row& row : rows) row[0] = std::ranges::lower_bound(used, row[0]) - used.begin();
  return {std::move(rows), std::move(used)};
}

}  // namespace vescale_ckpt::write
