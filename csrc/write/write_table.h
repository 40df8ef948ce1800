// The table of what to write that crosses from Python once a save: rows of 64-bit integers, one after another.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "write/writer.h"

namespace vescale_ckpt::write {

// Rows: dtype (and io::kUnchanging, so that the writer needs no copy), address, dimensions n, n sizes, n strides
// (elements). Throws Error(invalid, row).
std::vector<RecordSource> parse_write_table(std::span<const int64_t> table);

// The bytes of each row's tensor. Throws as above.
std::vector<int64_t> body_bytes(std::span<const int64_t> table);

}  // namespace vescale_ckpt::write
