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

// Hashes of a few elements of tensors, by which a save notices that memory was changed without a word.
//
// One hash for each row of a table for parse_write_table, of at most so many elements, evenly from one end to the other
// in C's order: copies with other strides have the same. `devices`: the device of each row, -1 for host memory; empty:
// all are there. The hash of a row on a device, or without elements, is 0. The memory of the tensors must be there.
// Throws Error(invalid, row).
std::vector<uint64_t> sample_hashes(std::span<const int64_t> table, std::span<const int64_t> devices,
                                    uint32_t elements);

}  // namespace vescale_ckpt::write
