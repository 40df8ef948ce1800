// Lays out a snapshot: the offset of each row in its memory. Bytes that several rows share are there once. Large bodies
// are aligned so that the writer can write them straight from there. Addresses are compared, never read: rows may lie
// on accelerators.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "write/writer.h"

namespace vescale_ckpt::stage {

// What is copied as one: the union of contiguous rows that overlap, or a strided row and its equals.
struct SnapshotExtent {
  const std::byte* source = nullptr;
  uint64_t bytes = 0;
  uint64_t offset = 0;               // in the snapshot
  const io::Box* strided = nullptr;  // of the source; null: contiguous
  size_t row = 0;                    // one of those that it is the copy of; if strided, they are all equal
};

struct SnapshotLayout {
  static constexpr uint64_t kAlignment = 64;
  static constexpr uint64_t kNowhere = std::numeric_limits<uint64_t>::max();  // rows without bytes

  size_t first = 0;                     // rows before it are not in the snapshot
  std::vector<SnapshotExtent> extents;  // by rising offset; nothing else lies up to the next multiple of kAlignment
  std::vector<uint64_t> offsets;        // of the rows from `first` on, in the snapshot
  uint64_t memory_bytes = 0;
  uint64_t copied_bytes = 0;  // of all extents
};

// Lays out the longest tail of `sources` that `room` has space for. Offsets are for memory that starts on a block. The
// layout points into `sources`.
SnapshotLayout lay_out_snapshot(std::span<const write::RecordSource> sources, uint64_t room);

}  // namespace vescale_ckpt::stage
