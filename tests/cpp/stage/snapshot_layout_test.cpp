#include "stage/snapshot_layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

#include "base/memory.h"
#include "tensors.h"

namespace vescale_ckpt::stage {
namespace {

constexpr uint64_t kEndless = std::numeric_limits<uint64_t>::max();
constexpr uint64_t kNowhere = SnapshotLayout::kNowhere;

// Nothing is read or written: any address will do.
std::byte* at(uint64_t address) {
  return reinterpret_cast<std::byte*>(static_cast<uintptr_t>(address));
}

write::RecordSource row(uint64_t address, uint64_t bytes) {
  write::RecordSource source;
  source.data = at(address);
  source.bytes = bytes;
  return source;
}

write::RecordSource strided_row(uint64_t address, const Sizes& sizes, const Sizes& strides, uint32_t item_bytes = 4) {
  write::RecordSource source;
  source.data = at(address);
  source.strided.emplace(item_bytes, sizes, Sizes(sizes.size(), 0), sizes, strides);
  source.bytes = source.strided->bytes();
  return source;
}

// What any layout keeps to.
void expect_sound(const std::vector<write::RecordSource>& rows, const SnapshotLayout& layout) {
  uint64_t end = 0, following = 0, bytes = 0;
  for (const SnapshotCopy& copy : layout.copies) {
    ASSERT_GE(copy.offset, following);  // a copy from a device may run over what lies between
    end = copy.offset + copy.bytes;
    following = align_up(end, SnapshotLayout::kAlignment);
    bytes += copy.bytes;
  }
  EXPECT_EQ(layout.memory_bytes, end);
  EXPECT_EQ(layout.copied_bytes, bytes);
  ASSERT_EQ(layout.offsets.size(), rows.size() - layout.first);
  for (size_t index = layout.first; index < rows.size(); ++index) {
    const write::RecordSource& source = rows[index];
    const uint64_t offset = layout.offsets[index - layout.first];
    if (source.bytes == 0) {
      EXPECT_EQ(offset, kNowhere);
      continue;
    }
    const auto holds = [&](const SnapshotCopy& copy) {
      return offset >= copy.offset && offset + source.bytes <= copy.offset + copy.bytes &&
             copy.source + (offset - copy.offset) == source.data &&
             (source.strided ? copy.strided != nullptr && *copy.strided == *source.strided : copy.strided == nullptr);
    };
    EXPECT_EQ(std::count_if(layout.copies.begin(), layout.copies.end(), holds), 1) << "row " << index;
  }
}

TEST(SnapshotLayout, PutsLargeBodiesWhereTheyAreSentFromAndPacksTheRest) {
  const std::vector<write::RecordSource> rows = {row(1 << 20, 100), row(2 << 20, io::kLargeBody), row(8 << 20, 100),
                                                 row(9 << 20, 1), row(16 << 20, io::kLargeBody + 1)};
  const SnapshotLayout layout = lay_out_snapshot(rows, kEndless);
  expect_sound(rows, layout);
  EXPECT_EQ(layout.first, 0u);
  const uint64_t behind = align_up(write::kTorchOffset + io::kLargeBody, 64);
  EXPECT_EQ(layout.offsets,
            (std::vector<uint64_t>{0, kBlock + write::kTorchOffset, kBlock + behind, kBlock + behind + 128,
                                   2 * kBlock + io::kLargeBody + write::kTorchOffset}));
}

TEST(SnapshotLayout, PlacesOverlappingRowsForTheLargest) {
  constexpr uint64_t kStart = 1 << 30;
  const std::vector<write::RecordSource> rows = {row(kStart, 5000), row(kStart + 4000, 2 * io::kLargeBody),
                                                 row(kStart + 9000, io::kLargeBody)};
  const SnapshotLayout layout = lay_out_snapshot(rows, kEndless);
  expect_sound(rows, layout);
  EXPECT_EQ(layout.copies.size(), 1u);
  EXPECT_EQ(layout.offsets[1] % kBlock, write::kTorchOffset);
}

TEST(SnapshotLayout, TakesEqualStridedRowsOnce) {
  const std::vector<write::RecordSource> rows = {
      strided_row(4096, {3, 5}, {1, 3}), row(4096, 60),
      strided_row(4096, {3, 5}, {1, 3}), strided_row(4096, {5, 3}, {1, 5}),
      strided_row(8192, {3, 5}, {1, 3}), strided_row(4096, {1, 3, 5}, {99, 1, 3}),
  };
  const SnapshotLayout layout = lay_out_snapshot(rows, kEndless);
  expect_sound(rows, layout);
  EXPECT_EQ(layout.copies.size(), 4u);
  EXPECT_EQ(layout.offsets[0], layout.offsets[2]);
  EXPECT_EQ(layout.offsets[0], layout.offsets[5]);  // a dimension of one element changes nothing
}

TEST(SnapshotLayout, PutsLargeStridedRowsWhereTheyAreSentFrom) {
  const std::vector<write::RecordSource> rows = {row(4096, 65), strided_row(1 << 30, {1024, 1024}, {1, 1024})};
  const SnapshotLayout layout = lay_out_snapshot(rows, kEndless);
  expect_sound(rows, layout);
  EXPECT_EQ(layout.offsets[1], kBlock + write::kTorchOffset);
}

TEST(SnapshotLayout, TakesTheLastRowsThatThereIsRoomFor) {
  std::vector<write::RecordSource> rows;
  for (uint64_t index = 0; index < 10; ++index) rows.push_back(row(4096 * (index + 1), 64));
  EXPECT_EQ(lay_out_snapshot(rows, 640).first, 0u);
  for (uint64_t count = 0; count < 10; ++count) {
    for (const uint64_t room : {64 * count, 64 * count + 63}) {
      const SnapshotLayout layout = lay_out_snapshot(rows, room);
      expect_sound(rows, layout);
      EXPECT_EQ(layout.first, 10 - count);
      EXPECT_EQ(layout.memory_bytes, 64 * count);
    }
  }
}

TEST(SnapshotLayout, SharedBytesNeedNoRoomTwice) {
  const std::vector<write::RecordSource> rows = {row(4096, 64), row(8192, 64), row(4096, 64), row(8192, 32)};
  EXPECT_EQ(lay_out_snapshot(rows, 128).first, 0u);
  EXPECT_EQ(lay_out_snapshot(rows, 127).first, 2u);
  EXPECT_EQ(lay_out_snapshot(rows, 31).first, 4u);
}

TEST(SnapshotLayout, IsSoundForAnyRows) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    std::mt19937_64 random(seed);
    const uint64_t span = seed % 2 == 0 ? 2000 : 6 * io::kLargeBody;
    std::vector<write::RecordSource> rows;
    for (uint64_t count = random() % 40; count != 0; --count) {
      const uint64_t address = 4096 + random() % span;
      if (random() % 4 == 0) {
        rows.push_back(strided_row(address, {7, 3}, random() % 2 == 0 ? Sizes{1, 7} : Sizes{0, 1}));
      } else {
        rows.push_back(row(address, random() % 5 == 0 ? 0 : random() % (span / 3)));
      }
    }
    const uint64_t whole = lay_out_snapshot(rows, kEndless).memory_bytes;
    for (const uint64_t room : {kEndless, whole, whole / 2, whole / 10}) {
      const SnapshotLayout layout = lay_out_snapshot(rows, room);
      expect_sound(rows, layout);
      EXPECT_LE(layout.memory_bytes, room);
      // Each byte of contiguous rows once.
      std::vector<std::pair<const std::byte*, const std::byte*>> ranges;
      for (const SnapshotCopy& copy : layout.copies) {
        if (copy.strided == nullptr) ranges.emplace_back(copy.source, copy.source + copy.bytes);
      }
      std::sort(ranges.begin(), ranges.end());
      for (size_t index = 1; index < ranges.size(); ++index) EXPECT_LE(ranges[index - 1].second, ranges[index].first);
    }
  }
}

}  // namespace
}  // namespace vescale_ckpt::stage
