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

  // Adds the records that `writer` has placed. `rows`: the row of the plan for each record, in any order. `first_file`:
  // the number of the writer's first file.
  void add(const FileWriter& writer, std::span<const PlacedRecord> placed, std::span<const size_t> rows,
           uint64_t first_file);

  // All rows, with the files that hold any of them renumbered, and the old numbers of these files, ascending.
  std::pair<std::vector<Row>, std::vector<int64_t>> in_used_files() const;

 private:
  std::vector<Row> rows_;
};

}  // namespace vescale_ckpt::write
