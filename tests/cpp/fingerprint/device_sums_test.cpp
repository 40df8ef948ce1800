#include "fingerprint/device_sums.h"

#include "device/word_sums.h"
#include "fakes/fake_runtime.h"
#include "fingerprint/fingerprint.h"
#include "fingerprint/random_bytes.h"

namespace vescale_ckpt::fingerprint {
namespace {

using device::FakeRuntime;
using device::WordTable;
using field::sum;

// What the kernel makes of a chunk in host memory, lane by lane.
Value by_lanes(const Chunk& chunk) {
  WordTable table;
  EXPECT_TRUE(detail::add_to_table(flat(nullptr, 1, 0), table));  // so that pieces do not begin with the row's
  EXPECT_TRUE(detail::add_to_table(chunk, table));
  Value found = 0;
  for (uint32_t piece = 1; piece < table.pieces; ++piece) {
    EXPECT_EQ(device::row_of_piece(table.rows.data(), 2, piece), 1u);
    for (uint32_t lane = 0; lane < device::kSumLanes; ++lane) {
      found = sum(found, device::lane_sum(table.rows[1], piece - 1, lane, word_powers()));
    }
  }
  return found;
}

TEST(WordSums, OfEverySizeAlignmentAndPlace) {
  const std::vector<std::byte> data = random_bytes(800, 1);
  for (size_t bytes = 1; bytes + 4 < data.size(); ++bytes) {
    for (size_t at = 0; at < 4; ++at) {
      const std::vector<std::byte> copy(data.begin(),
                                        data.begin() + static_cast<ptrdiff_t>(at + bytes));  // no byte behind
      for (int64_t place = 0; place < 6; ++place) {
        ASSERT_EQ(by_lanes(flat(copy.data() + at, bytes, place)), of_bytes(copy.data() + at, bytes, place))
            << bytes << " bytes at " << at << ", place " << place;
      }
    }
  }
}

TEST(WordSums, OfPiecesAndTheirBorders) {
  constexpr uint64_t kPieceBytes = device::kSumPieceWords * device::kSumWordBytes;
  const std::vector<std::byte> data = random_bytes(3 * kPieceBytes + 100, 2);
  std::mt19937_64 random(3);
  for (int round = 0; round < 100; ++round) {
    const uint64_t at = random() % 20, bytes = kPieceBytes * (1 + random() % 2) - 20 + random() % 40;
    const int64_t place = static_cast<int64_t>(random() % 100'000'000'000);
    ASSERT_EQ(by_lanes(flat(data.data() + at, bytes, place)), of_bytes(data.data() + at, bytes, place))
        << bytes << " bytes at " << at << ", place " << place;
  }
}

TEST(WordSums, HaveRoomForTheLargestWords) {
  const std::vector<std::byte> ones(100'000, std::byte{0xff});
  EXPECT_EQ(by_lanes(flat(ones.data(), ones.size(), 0)), of_bytes(ones.data(), ones.size(), 0));
}

TEST(WordSums, OfShardsAddUp) {
  const std::vector<int64_t> shape{6, 50, 700}, strides{50 * 700, 700, 1};
  for (const uint32_t item : {1u, 2u, 4u, 8u}) {
    const std::vector<std::byte> data = random_bytes(6 * 50 * 700 * item, item);
    const Value whole = of_bytes(data.data(), data.size(), 0);
    for (size_t dim = 0; dim < 3; ++dim) {
      std::vector<int64_t> first = shape, second = shape, offset(3);
      first[dim] = offset[dim] = shape[dim] / 2 - 1;
      second[dim] -= offset[dim];
      const Chunk one{io::Box(item, shape, std::vector<int64_t>(3), first, strides), data.data()};
      const Chunk other{io::Box(item, shape, offset, second, strides), data.data() + offset[dim] * strides[dim] * item};
      EXPECT_TRUE(is_for_kernel(one.box));
      EXPECT_EQ(sum(by_lanes(one), by_lanes(other)), whole) << item << " bytes, dim " << dim;
    }
  }
}

TEST(WordSums, ShortRunsAndThoseOfSeveralDimensionsAreNotForTheKernel) {
  const std::vector<int64_t> zero(3), shape{5, 1000, 100}, packed{100'000, 100, 1}, turned{100'000, 1, 1000};
  const std::vector<int64_t> rows{200'000, 200, 1}, gaps{300'000, 200, 1};
  EXPECT_TRUE(is_for_kernel(io::Box(1, shape, zero, shape, packed)));
  EXPECT_TRUE(is_for_kernel(io::Box(4, shape, zero, shape, rows)));
  EXPECT_FALSE(is_for_kernel(io::Box(4, shape, zero, shape, turned)));
  EXPECT_FALSE(is_for_kernel(io::Box(1, shape, zero, shape, rows)));
  EXPECT_FALSE(is_for_kernel(io::Box(4, shape, zero, shape, gaps)));
  const std::vector<int64_t> origin(2), many{int64_t{1} << 40, 300}, again{0, 1};
  EXPECT_FALSE(is_for_kernel(io::Box(1, many, origin, many, again)));  // more pieces than a launch has
}

// --- On a device

class DeviceSums : public testing::Test {
 protected:
  // Copies the data to the device, and returns the chunk there.
  Chunk there(const Chunk& chunk, uint64_t bytes) {
    const device::DeviceAddress address = runtime_.allocate(0, bytes);
    std::memcpy(runtime_.memory(address), chunk.memory, bytes);
    return {chunk.box, reinterpret_cast<const std::byte*>(address)};
  }
  auto found(std::span<const Chunk> chunks) { return of_device_chunks(runtime_.accelerator(0), 0, chunks); }

  FakeRuntime runtime_;
  std::vector<std::byte> data_ = random_bytes(200'000, 7);
};

TEST_F(DeviceSums, OfMoreChunksThanALaunchTakes) {
  std::vector<Chunk> here, on_device;
  const Chunk all = there(flat(data_.data(), data_.size(), 0), data_.size());
  for (size_t i = 0; i < device::kWordRows + 100; ++i) {
    here.push_back(flat(data_.data() + i, 7, static_cast<int64_t>(i)));
    on_device.push_back(flat(all.memory + i, 7, static_cast<int64_t>(i)));
  }
  EXPECT_EQ(found(on_device), of_chunks(here, 1));
  EXPECT_EQ(runtime_.count("cuLaunchKernel"), 2u);
}

TEST_F(DeviceSums, ErrorsOfADeviceAreThrown) {
  const std::vector<Chunk> chunks{there(flat(data_.data(), 1000, 0), 1000)};
  for (const char* call : {"cudaMemcpyAsync", "cudaMemsetAsync", "cuLaunchKernel", "cudaStreamSynchronize"}) {
    runtime_.fail(call);
    EXPECT_THROW(found(chunks), Error) << call;
  }
  EXPECT_NE(found(chunks), std::nullopt);
  const std::vector<Chunk> outside{flat(chunks[0].memory, 1001, 0)};
  EXPECT_THROW(found(outside), Error);  // the kernel would read behind an allocation
}

}  // namespace
}  // namespace vescale_ckpt::fingerprint
