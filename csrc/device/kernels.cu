// The kernels. What a lane does is in pack_rows.h and word_sums.h.
#include "device/pack_rows.h"
#include "device/word_sums.h"

// A warp for each piece of the slab.
extern "C" __global__ void vescale_ckpt_pack(char* slab, const vescale_ckpt::device::PackRow* rows, uint32_t row_count,
                                             const vescale_ckpt::device::PackDim* dims, uint32_t bytes) {
  const uint32_t piece = (blockIdx.x * blockDim.x + threadIdx.x) / vescale_ckpt::device::kPackLanes;
  if (piece * vescale_ckpt::device::kPackPieceBytes >= bytes) return;
  vescale_ckpt::device::copy_piece(slab, rows, row_count, dims, bytes, piece,
                                   threadIdx.x % vescale_ckpt::device::kPackLanes);
}

// A warp for each piece of the table. `sums`: one for each row, 0 before.
extern "C" __global__ void __launch_bounds__(256)
    vescale_ckpt_sum_words(vescale_ckpt::device::WordSum* sums, const vescale_ckpt::device::WordPowers* powers,
                           const vescale_ckpt::device::WordRow* rows, uint32_t row_count, uint32_t pieces) {
  using namespace vescale_ckpt::device;
  // There may be more threads than 32 bits count.
  const uint32_t piece = blockIdx.x * (blockDim.x / kSumLanes) + threadIdx.x / kSumLanes;
  const uint32_t lane = threadIdx.x % kSumLanes;
  if (piece >= pieces) return;
  const uint32_t index = row_of_piece(rows, row_count, piece);
  const WordRow row = rows[index];
  vescale_ckpt::field::Value sum = lane_sum(row, piece - row.first_piece, lane, *powers);
  for (uint32_t distance = kSumLanes / 2; distance != 0; distance /= 2) {
    const uint64_t low = __shfl_down_sync(~0u, static_cast<unsigned long long>(sum), distance);
    const uint64_t high = __shfl_down_sync(~0u, static_cast<unsigned long long>(sum >> 64), distance);
    sum = vescale_ckpt::field::sum(sum, (vescale_ckpt::field::Value{high} << 64) | low);
  }
  if (lane != 0) return;
  for (uint32_t i = 0; i < 4; ++i) {
    atomicAdd(reinterpret_cast<unsigned long long*>(&sums[index].columns[i]),
              static_cast<unsigned long long>(static_cast<uint32_t>(sum >> (32 * i))));
  }
}
