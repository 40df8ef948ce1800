// The tables that cross from Python once a save or load: rows of 64-bit integers, one after another.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "error.h"
#include "format/torch_record.h"
#include "io/box_copy.h"
#include "io/reader.h"
#include "io/writer.h"

namespace vescale_ckpt::io {

// Walks along a table; what does not fit throws Error(invalid, row).
class TableCursor {
 public:
  explicit TableCursor(std::span<const int64_t> table) : rest_(table) {}
  bool at_end() const { return rest_.empty(); }
  int64_t row() const { return row_; }
  void next_row() { ++row_; }

  std::span<const int64_t> take(size_t count) {
    if (count > rest_.size()) throw Error::invalid("the table ends inside a row", row_);
    const auto values = rest_.first(count);
    rest_ = rest_.subspan(count);
    return values;
  }
  uint64_t size() {
    const int64_t value = take(1)[0];
    if (value < 0) throw Error::invalid("a negative offset, length or count in the table", row_);
    return static_cast<uint64_t>(value);
  }
  std::byte* address() { return reinterpret_cast<std::byte*>(static_cast<uintptr_t>(take(1)[0])); }
  uint32_t dtype() {
    const uint64_t code = size();
    if (code >= format::dtypes().size()) throw Error::invalid("unknown dtype code in the table", row_);
    return static_cast<uint32_t>(code);
  }

 private:
  std::span<const int64_t> rest_;
  int64_t row_ = 0;
};

// Rows: dtype, address, dimensions n, n sizes, n strides (elements). Throws Error(invalid, row).
std::vector<RecordSource> parse_write_table(std::span<const int64_t> table);

// Rows: file, record offset, record length, CRC-32 of the tensor or -1, dtype, dimensions n, n chunk sizes, n box
// offsets, n box sizes, address of the box's first element, n strides (elements). Throws Error(invalid, row).
std::vector<ReadItem> parse_read_table(std::span<const int64_t> table);

// Rows: file, record offset, record length, CRC-32 of the tensor or -1, dtype, dimensions n, n sizes. For
// check_tensors: whole tensors without memory. Throws Error(invalid, row).
std::vector<ReadItem> parse_check_table(std::span<const int64_t> table);

// Rows: dtype, address of the piece, dimensions n, n sizes of the piece, n offsets of the box in it, n sizes of the
// box, address of the box's first element, n strides (elements). Throws Error(invalid, row).
std::vector<BoxCopy> parse_copy_table(std::span<const int64_t> table);

// Rows: file, offset, length.
std::vector<ByteRange> parse_range_table(std::span<const int64_t> table);

}  // namespace vescale_ckpt::io
