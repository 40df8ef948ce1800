// The table of a slab's rows: strided or dense ranges anywhere on the device, which follow each other in the slab. The
// kernel reads it: plain data, fixed layout.
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
  uint64_t address;  // device address of the first element of the whole strided range, or of the first byte
  uint64_t first;    // in a strided range: index of the unit at which this row begins
  uint32_t offset;   // in the slab, ascending
  uint32_t bytes;
  uint32_t unit;  // in a strided range: 1, 2, 4, 8 or 16 contiguous bytes that are aligned on both sides
  uint32_t dims;  // 0: one run of bytes; otherwise the number of dimensions of units, outermost first
  uint32_t dims_at;
  uint32_t padding;
};

struct PackTable {
  std::vector<PackRow> rows;
  std::vector<PackDim> dims;
  uint32_t bytes = 0;  // used bytes of the slab
};

// A slab's table has room for so many rows and dimensions.
inline constexpr uint32_t kPackRows = 8192;
inline constexpr uint32_t kPackDims = 16384;

inline constexpr uint64_t kMaxSlabBytes = uint64_t{64} << 20;

}  // namespace vescale_ckpt::device
