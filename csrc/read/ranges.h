// Reads byte ranges of files as they are: objects, and records that the caller takes apart itself.
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

// Ranges that lie close together are read as one, on the calling thread. `targets[i]` has room for ranges[i]. Nothing
// is verified. Throws Error (corrupt: a file is too short; io) with the range as item.
void read_ranges(std::span<const std::string> paths, std::span<const ByteRange> ranges,
                 std::span<std::byte* const> targets, const io::EngineOptions& options);

}  // namespace vescale_ckpt::read
