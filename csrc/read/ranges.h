// Reads byte ranges of files: objects, and records that the caller parses itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "io/transfer_loop.h"

namespace vescale_ckpt::read {

struct ByteRange {
  uint32_t file;  // index into the paths
  uint64_t offset;
  uint64_t length;
};

// Reads the ranges on the calling thread; ranges that lie close together become one read. `targets[i]` has room for
// ranges[i]. Verifies nothing. Throws Error (corrupt: a file is too short; io) with the range as item.
void read_ranges(std::span<const std::string> paths, std::span<const ByteRange> ranges,
                 std::span<std::byte* const> targets, const io::EngineOptions& options);

}  // namespace vescale_ckpt::read
