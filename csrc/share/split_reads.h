// Parts what ranks read, so that a plan for many ranks and tensors is made part by part in bounded memory.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace vescale_ckpt::share {

// Where the last record starts, in bytes of its file; 0 if there is none. Throws Error (invalid) for malformed reads.
int64_t last_record(std::span<const int64_t> reads);

// The rows of `reads` (metadata/load_plan.h) in `parts` tables. Rows of one record are in the same part on all ranks:
// files are cut into ranges of `range_bytes`, by where records start, and ranges are dealt out in turn. Throws
// Error (invalid) for malformed reads.
std::vector<std::vector<int64_t>> split_reads(std::span<const int64_t> reads, std::span<const std::string> files,
                                              uint32_t parts, uint64_t range_bytes);

}  // namespace vescale_ckpt::share
