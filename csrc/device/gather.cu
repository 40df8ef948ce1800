// The pack kernel: a warp for each piece of the slab. What a lane does is in pack_rows.h.
#include "device/pack_rows.h"

extern "C" __global__ void vescale_ckpt_pack(char* slab, const vescale_ckpt::device::PackRow* rows, uint32_t row_count,
                                             const vescale_ckpt::device::PackDim* dims, uint32_t bytes) {
  const uint32_t piece = (blockIdx.x * blockDim.x + threadIdx.x) / vescale_ckpt::device::kPackLanes;
  if (piece * vescale_ckpt::device::kPackPieceBytes >= bytes) return;
  vescale_ckpt::device::copy_piece(slab, rows, row_count, dims, bytes, piece,
                                   threadIdx.x % vescale_ckpt::device::kPackLanes);
}
