// What a slab holds: rows of ranges, strided or not, that lie somewhere on the device and one behind the other in the
// slab. Shared with the kernel: plain data, fixed layout.
#pragma once

#include <cstdint>
#include <vector>

namespace vescale_ckpt::device {

// One dimension of a strided range.
struct PackDim {
  uint64_t count;
  int64_t stride;  // bytes
};

struct PackRow {
  uint64_t address;  // on the device: of the first element of the whole strided range, or of the first byte
  uint64_t first;    // strided: at which of its units this row begins
  uint32_t offset;   // in the slab; rising from row to row
  uint32_t bytes;
  uint32_t unit;  // strided: 1, 2, 4, 8 or 16 bytes that lie together and are aligned on both sides
  uint32_t dims;  // 0: one run of bytes; otherwise so many dimensions of units, outermost first
  uint32_t dims_at;
  uint32_t padding;
};

struct PackTable {
  std::vector<PackRow> rows;
  std::vector<PackDim> dims;
  uint32_t bytes = 0;  // of the slab that are used
};

// What a slab's table has room for.
inline constexpr uint32_t kPackRows = 8192;
inline constexpr uint32_t kPackDims = 16384;

inline constexpr uint64_t kMaxSlabBytes = uint64_t{64} << 20;

}  // namespace vescale_ckpt::device
