// Reads the tables that cross from Python: rows of 64-bit integers, one after another.
#pragma once

#include <cstdint>
#include <span>

#include "base/error.h"
#include "format/torch_record.h"

namespace vescale_ckpt::io {

// A bit in the dtype of a row of a write table (write/writer.h): no thread changes the row's memory before it is
// written.
inline constexpr uint64_t kUnchanging = 1 << 16;

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
  // The code of a dtype. `flag`: a bit that the table may add to it.
  uint32_t dtype(uint64_t flag = 0, bool* flagged = nullptr) {
    uint64_t code = size();
    if (flagged != nullptr) *flagged = (code & flag) != 0;
    code &= ~flag;
    if (code >= format::dtypes().size()) throw Error::invalid("unknown dtype code in the table", row_);
    return static_cast<uint32_t>(code);
  }
  // Returns what `make` makes of the row. An Error that `make` throws becomes Error (invalid, row).
  template <typename Make>
  auto made_of_row(const Make& make) const {
    try {
      return make();
    } catch (const Error& error) {
      throw Error::invalid(error.what(), row_);
    }
  }

 private:
  std::span<const int64_t> rest_;
  int64_t row_ = 0;
};

}  // namespace vescale_ckpt::io
