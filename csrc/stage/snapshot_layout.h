// Lays out a snapshot: the offset of each row in its memory. Bytes that several rows share are stored once. Large
// bodies are aligned so that the writer can write them in place. Addresses are compared, never read, because rows may
// lie on accelerators.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "write/writer.h"

namespace vescale_ckpt::stage {

// Memory that is copied in one step: the union of contiguous rows that overlap, or a strided row and equal rows.
struct SnapshotCopy {
  const std::byte* source = nullptr;
  uint64_t bytes = 0;
  uint64_t offset = 0;               // offset in the snapshot
  const io::Box* strided = nullptr;  // box of the source; null: contiguous
  size_t row = 0;                    // one of its rows; if strided, all of them are equal
};

struct SnapshotLayout {
  static constexpr uint64_t kAlignment = 64;
  static constexpr uint64_t kNowhere = std::numeric_limits<uint64_t>::max();  // rows without bytes

  size_t first = 0;                  // rows before it are not in the snapshot
  std::vector<SnapshotCopy> copies;  // by ascending offset; each has all bytes up to the next multiple of kAlignment
  std::vector<uint64_t> offsets;     // offset in the snapshot of each row from `first` on
  uint64_t memory_bytes = 0;
  uint64_t copied_bytes = 0;  // sum over all copies
};

// Lays out the longest tail of `sources` that fits into `room`. The memory must start on a block. The layout points
// into `sources`.
SnapshotLayout lay_out_snapshot(std::span<const write::RecordSource> sources, uint64_t room);

}  // namespace vescale_ckpt::stage
