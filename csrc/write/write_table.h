// The table of what to write that crosses from Python once a save: rows of 64-bit integers, one after another.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "write/writer.h"

namespace vescale_ckpt::write {

// A bit in a row's dtype: no thread changes the row's memory before it is written. So the writer needs no copy.
inline constexpr uint64_t kUnchanging = 1 << 16;

// Rows: dtype, address, dimensions n, n sizes, n strides (elements). Throws Error(invalid, row).
std::vector<RecordSource> parse_write_table(std::span<const int64_t> table);

// The bytes of each row's tensor. Throws as above.
std::vector<int64_t> body_bytes(std::span<const int64_t> table);

}  // namespace vescale_ckpt::write
