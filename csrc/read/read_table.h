// Parses the tables of reads that Python gives once a load: rows of 64-bit integers, one after another.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "read/reader.h"

namespace vescale_ckpt::read {

// Rows: file, record offset, record length, CRC-32 of the tensor or -1, dtype, dimensions n, n chunk sizes, n box
// offsets, n box sizes, address of the box's first element, n strides (elements). `devices`: the device of each row,
// -1: host memory; empty: all rows are in host memory. Throws Error(invalid, row).
std::vector<ReadItem> parse_read_table(std::span<const int64_t> table, std::span<const int64_t> devices = {});

// Rows: file, record offset, record length, CRC-32 of the tensor or -1, dtype, dimensions n, n sizes. They are whole
// tensors without memory, for check_tensors. Throws Error(invalid, row).
std::vector<ReadItem> parse_check_table(std::span<const int64_t> table);

}  // namespace vescale_ckpt::read
