// Where the rows of a rank's plan lie in its files: filled while they are written, then sent to the coordinator, whose
// metadata::RecordLocations reads the same rows.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "write/writer.h"

namespace vescale_ckpt::write {

class LocationTable {
 public:
  using Row = std::array<int64_t, 4>;  // file, offset, length, CRC-32 (-1: none)

  // Takes what `writer` has written, which began with the file of that number. `rows`: of the plan, one of each record,
  // in any order.
  void add(const FileWriter& writer, std::span<const PlacedRecord> placed, std::span<const size_t> rows,
           uint64_t first_file);

  // All rows, with the files that hold any of them numbered anew, and the old numbers of these files, ascending.
  std::pair<std::vector<Row>, std::vector<int64_t>> in_used_files() const;

 private:
  std::vector<Row> rows_;
};

}  // namespace vescale_ckpt::write
