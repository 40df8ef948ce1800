// Does the work of one lane of the pack kernel. kernels.cu compiles it for the device, and the tests compile it for the
// host, where the fake device runs the same code lane by lane.
#pragma once

#include <cstdint>

#include "device/pack_table.h"

#ifdef __CUDACC__
#define VESCALE_CKPT_LANE __device__ __forceinline__
#define VESCALE_CKPT_NO_UNROLL _Pragma("unroll 1")  // unrolled divisions would make the kernel ten times larger
#else
#define VESCALE_CKPT_LANE inline
#define VESCALE_CKPT_NO_UNROLL
#endif

namespace vescale_ckpt::device {

inline constexpr uint32_t kPackLanes = 32;         // so many lanes share a piece
inline constexpr uint32_t kPackPieceBytes = 2048;  // a piece of the slab is a multiple of every unit

struct alignas(16) PackVector {
  uint64_t low, high;
};

// Copies whole units T, and single bytes before and after them. Both sides must have the same alignment.
template <typename T>
VESCALE_CKPT_LANE void copy_aligned(char* to, const char* from, uint32_t bytes, uint32_t lane) {
  uint32_t head = static_cast<uint32_t>(-reinterpret_cast<uintptr_t>(to) % sizeof(T));
  if (head > bytes) head = bytes;
  const uint32_t units = (bytes - head) / static_cast<uint32_t>(sizeof(T));
  const uint32_t tail = head + units * static_cast<uint32_t>(sizeof(T));
  for (uint32_t i = lane; i < head; i += kPackLanes) to[i] = from[i];
  for (uint32_t i = lane; i < units; i += kPackLanes) {
    reinterpret_cast<T*>(to + head)[i] = reinterpret_cast<const T*>(from + head)[i];
  }
  for (uint32_t i = tail + lane; i < bytes; i += kPackLanes) to[i] = from[i];
}

VESCALE_CKPT_LANE void copy_run(char* to, const char* from, uint32_t bytes, uint32_t lane) {
  const uintptr_t differ = reinterpret_cast<uintptr_t>(to) ^ reinterpret_cast<uintptr_t>(from);
  if (differ % 16 == 0) {
    copy_aligned<PackVector>(to, from, bytes, lane);
  } else if (differ % 8 == 0) {
    copy_aligned<uint64_t>(to, from, bytes, lane);
  } else if (differ % 4 == 0) {
    copy_aligned<uint32_t>(to, from, bytes, lane);
  } else {
    copy_aligned<char>(to, from, bytes, lane);
  }
}

template <typename T>
VESCALE_CKPT_LANE void copy_units(char* slab, const PackRow& row, const PackDim* dims, uint32_t begin, uint32_t end,
                                  uint32_t lane) {
  VESCALE_CKPT_NO_UNROLL
  for (uint32_t i = begin / sizeof(T) + lane; i < end / sizeof(T); i += kPackLanes) {
    uint64_t index = row.first + i;
    int64_t offset = 0;
    VESCALE_CKPT_NO_UNROLL
    for (uint32_t dim = row.dims; dim-- > 0;) {
      const uint64_t outer = index / dims[dim].count;
      offset += static_cast<int64_t>(index - outer * dims[dim].count) * dims[dim].stride;
      index = outer;
    }
    reinterpret_cast<T*>(slab)[i] = *reinterpret_cast<const T*>(row.address + static_cast<uint64_t>(offset));
  }
}

// Copies bytes [begin, end) of a row. `slab` is the start of the row in the slab.
VESCALE_CKPT_LANE void copy_row(char* slab, const PackRow& row, const PackDim* dims, uint32_t begin, uint32_t end,
                                uint32_t lane) {
  if (row.dims == 0) {
    return copy_run(slab + begin, reinterpret_cast<const char*>(row.address) + begin, end - begin, lane);
  }
  dims += row.dims_at;
  switch (row.unit) {
    case 16:
      return copy_units<PackVector>(slab, row, dims, begin, end, lane);
    case 8:
      return copy_units<uint64_t>(slab, row, dims, begin, end, lane);
    case 4:
      return copy_units<uint32_t>(slab, row, dims, begin, end, lane);
    case 2:
      return copy_units<uint16_t>(slab, row, dims, begin, end, lane);
    default:
      return copy_units<char>(slab, row, dims, begin, end, lane);
  }
}

// Copies one lane's part of a piece of the slab. Work is cut by bytes of the slab, so that rows of any size keep all
// lanes busy.
VESCALE_CKPT_LANE void copy_piece(char* slab, const PackRow* rows, uint32_t row_count, const PackDim* dims,
                                  uint32_t bytes, uint32_t piece, uint32_t lane) {
  const uint32_t begin = piece * kPackPieceBytes;
  const uint32_t end = bytes - begin < kPackPieceBytes ? bytes : begin + kPackPieceBytes;
  uint32_t low = 0, high = row_count;  // the first row that ends behind `begin`
  while (low < high) {
    const uint32_t middle = (low + high) / 2;
    if (rows[middle].offset + rows[middle].bytes <= begin) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  for (; low < row_count && rows[low].offset < end; ++low) {
    const PackRow row = rows[low];
    const uint32_t from = begin > row.offset ? begin - row.offset : 0;
    const uint32_t to = end - row.offset < row.bytes ? end - row.offset : row.bytes;
    copy_row(slab + row.offset, row, dims, from, to, lane);
  }
}

}  // namespace vescale_ckpt::device
