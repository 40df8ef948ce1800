#include "device/copy_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "base/error.h"

namespace vescale_ckpt::device {
namespace {

constexpr DeviceAddress kDevice = DeviceAddress{1} << 40;

std::byte* host(uint64_t address) {
  return reinterpret_cast<std::byte*>(address);
}

DeviceRow flat(DeviceAddress device, uint64_t at, int64_t bytes) {
  const int64_t stride = 1;
  return DeviceRow(device, host(at), 1, {&bytes, 1}, {&stride, 1});
}

DeviceRow strided(DeviceAddress device, uint64_t at, uint32_t item_bytes, std::vector<int64_t> sizes,
                  std::vector<int64_t> strides) {
  return DeviceRow(device, host(at), item_bytes, sizes, strides);
}

std::vector<CopyGroup> groups(std::vector<DeviceRow> rows, const HostLayout& layout = {},
                              const CopyLimits& limits = {}) {
  uint64_t bytes = 0;
  for (const DeviceRow& row : rows) bytes += row.bytes;
  CopyPlan plan(std::move(rows), layout, limits);
  std::vector<CopyGroup> result(1);
  uint64_t total = 0;
  while (plan.next(result.back())) {
    total += result.back().bytes;
    result.emplace_back();
  }
  result.pop_back();
  EXPECT_EQ(total, bytes);
  return result;
}

TEST(DeviceRow, JoinsDimensionsThatLieTogether) {
  const DeviceRow whole = strided(kDevice, 0, 4, {2, 3, 5}, {15, 5, 1});
  EXPECT_EQ(whole.run, 120u);
  EXPECT_TRUE(whole.dims.empty());
  const DeviceRow cut = strided(kDevice, 0, 4, {2, 3, 5}, {30, 10, 1});
  EXPECT_EQ(cut.run, 20u);
  ASSERT_EQ(cut.dims.size(), 1u);
  EXPECT_EQ(cut.dims[0].count, 6u);
  EXPECT_EQ(cut.dims[0].stride, 40);
  EXPECT_EQ(cut.address_of_run(3 * 20), kDevice + 120);
  EXPECT_EQ(strided(kDevice, 0, 4, {1, 7, 1}, {99, 1, 99}).run, 28u);
  EXPECT_EQ(strided(kDevice, 0, 4, {3, 0}, {7, 9}).bytes, 0u);
  EXPECT_THROW(strided(kDevice, 0, 4, {3, -1}, {1, 1}), Error);
  EXPECT_THROW(strided(kDevice, 0, 4, {INT64_MAX, 8}, {8, 1}), Error);
  EXPECT_THROW(strided(kDevice, 0, 4, {2, 8}, {INT64_MAX, 1}), Error);
}

TEST(CopyPlan, ManySmallRowsThatFollowOneAnotherAreOneCopy) {
  std::vector<DeviceRow> rows;
  for (uint64_t i = 0; i < 1000; ++i) rows.push_back(flat(kDevice + 512 * i, 64 * 1000 + 64 * i, 40));
  const auto some = groups(rows, {.alignment = 64});
  ASSERT_EQ(some.size(), 1u);
  EXPECT_EQ(some[0].table.rows.size(), 1000u);
  ASSERT_EQ(some[0].flat.size(), 1u);
  EXPECT_EQ(some[0].flat[0].bytes, 64u * 999 + 40);
  EXPECT_EQ(some[0].bytes, 40'000u);
  EXPECT_EQ(some[0].table.rows[7].offset, 7u * 64);

  // What lies between them may be somebody's: nothing to gain by packing.
  const auto apart = groups(rows);
  ASSERT_EQ(apart.size(), 1u);
  EXPECT_FALSE(apart[0].packed());
  EXPECT_EQ(apart[0].flat.size(), 1000u);
}

// A slab's copies reach over all of the host's memory, of which the first may wait for the last to be locked.
TEST(CopyPlan, PackedRowsGoLast) {
  std::vector<DeviceRow> rows;
  for (uint64_t i = 0; i < 6; ++i) rows.push_back(flat(kDevice + (i << 20), 1000 * i, i % 3 == 0 ? 100'000 : 1000));
  const auto some = groups(rows, {}, {.small_bytes = 1000});
  ASSERT_EQ(some.size(), 2u);
  EXPECT_FALSE(some[0].packed());
  ASSERT_EQ(some[0].flat.size(), 2u);
  EXPECT_EQ(some[0].flat[0].host, host(0));
  EXPECT_EQ(some[0].flat[1].host, host(3000));
  EXPECT_EQ(some[1].table.rows.size(), 4u);
}

TEST(CopyPlan, TablesAndGroupsHaveAnEnd) {
  std::vector<DeviceRow> rows;
  for (uint64_t i = 0; i < 2 * kPackRows + 1; ++i) rows.push_back(flat(kDevice + 16 * i, 8 * i, 8));
  const auto packed = groups(rows);
  ASSERT_EQ(packed.size(), 3u);
  EXPECT_EQ(packed[0].table.rows.size(), kPackRows);
  EXPECT_EQ(packed[2].table.rows.size(), 1u);

  const auto single = groups(rows, {}, {.slab_bytes = 0, .group_copies = 1000});
  EXPECT_EQ(single.size(), 17u);
  for (const CopyGroup& group : single) EXPECT_LE(group.flat.size(), 1000u);

  const auto large = groups({flat(kDevice, 0, 1000)}, {}, {.group_bytes = 300});
  ASSERT_EQ(large.size(), 4u);
  EXPECT_EQ(large[3].flat[0].device, kDevice + 900);
  EXPECT_EQ(large[3].flat[0].bytes, 100u);
}

TEST(CopyPlan, LongRunsGoBy2DCopiesAndShortOnesPacked) {
  const auto long_runs = groups({strided(kDevice, 0, 4, {100, 2048}, {4096, 1})});
  ASSERT_EQ(long_runs.size(), 1u);
  EXPECT_FALSE(long_runs[0].packed());
  ASSERT_EQ(long_runs[0].pitched.size(), 1u);
  EXPECT_EQ(long_runs[0].pitched[0].width, 8192u);
  EXPECT_EQ(long_runs[0].pitched[0].height, 100u);
  EXPECT_EQ(long_runs[0].pitched[0].device_pitch, 16384u);
  EXPECT_EQ(long_runs[0].pitched[0].host_pitch, 8192u);

  const DeviceRow transposed = strided(kDevice, 0, 4, {300, 200}, {1, 300});
  const auto packed = groups({transposed});
  ASSERT_EQ(packed.size(), 1u);
  ASSERT_EQ(packed[0].table.rows.size(), 1u);
  EXPECT_EQ(packed[0].table.rows[0].unit, 4u);
  EXPECT_EQ(packed[0].flat.size(), 1u);

  const auto no_slab = groups({transposed}, {}, {.slab_bytes = 0});
  ASSERT_EQ(no_slab.size(), 1u);
  EXPECT_EQ(no_slab[0].pitched.size(), 300u);
  EXPECT_EQ(no_slab[0].pitched[1].device, kDevice + 4);
  EXPECT_EQ(no_slab[0].pitched[1].height, 200u);
}

TEST(CopyPlan, UnitsAreAsWideAsAlignmentAllows) {
  const auto unit = [](DeviceAddress device, int64_t inner, int64_t stride) {
    return groups({strided(device, 0, 2, {4, inner}, {stride, 1})})[0].table.rows[0].unit;
  };
  EXPECT_EQ(unit(kDevice, 8, 16), 16u);
  EXPECT_EQ(unit(kDevice + 8, 8, 16), 8u);
  EXPECT_EQ(unit(kDevice, 8, 10), 4u);
  EXPECT_EQ(unit(kDevice, 3, 16), 2u);
  EXPECT_EQ(unit(kDevice + 1, 8, 16), 1u);
}

TEST(CopyPlan, PitchesThatNoDeviceTakesAreCopiedRunByRun) {
  for (const int64_t stride : {int64_t{0}, int64_t{-100}, int64_t{50}, int64_t{3} << 30}) {
    const auto some = groups({strided(kDevice, 0, 1, {3, 100}, {stride, 1})}, {}, {.slab_bytes = 0});
    ASSERT_EQ(some.size(), 1u);
    EXPECT_TRUE(some[0].pitched.empty());
    ASSERT_EQ(some[0].flat.size(), 3u);
    EXPECT_EQ(some[0].flat[2].device, kDevice + static_cast<uint64_t>(2 * stride));
  }
}

TEST(CopyPlan, NothingIsNoGroup) {
  EXPECT_TRUE(groups({}).empty());
  EXPECT_TRUE(groups({flat(kDevice, 0, 0)}).empty());
}

}  // namespace
}  // namespace vescale_ckpt::device
