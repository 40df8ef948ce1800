#include "plan/balance.h"

#include <gtest/gtest.h>

#include <deque>
#include <initializer_list>
#include <numeric>

#include "base/fill_level.h"

namespace vescale_ckpt::plan {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

uint32_t add(HolderSets& sets, const std::vector<uint32_t>& ranks) {
  std::vector<Holder> holders;
  for (const uint32_t rank : ranks) holders.push_back({rank, 0});
  return sets.add(holders);
}

TEST(HolderSets, KeepEachOnce) {
  HolderSets sets;
  EXPECT_EQ(add(sets, {1, 2}), 0u);
  EXPECT_EQ(add(sets, {1, 2, 3}), 1u);
  EXPECT_EQ(add(sets, {1, 2}), 0u);
  EXPECT_EQ(sets.size(), 2u);
  EXPECT_EQ(sets.members(), 5u);
  EXPECT_EQ(sets[1].size(), 3u);
}

TEST(EvenSplit, LevelIsTheLowestThatHoldsIt) {
  const std::vector<uint32_t> ranks = {0, 2, 3};
  const std::vector<int64_t> loads = {10, 999, 4, 0};
  EXPECT_EQ(fill_level<int64_t>(ranks, loads, 0), 0);
  EXPECT_EQ(fill_level<int64_t>(ranks, loads, 3), 3);
  EXPECT_EQ(fill_level<int64_t>(ranks, loads, 4), 4);
  EXPECT_EQ(fill_level<int64_t>(ranks, loads, 5), 5);
  EXPECT_EQ(fill_level<int64_t>(ranks, loads, 16), 10);
  EXPECT_EQ(fill_level<int64_t>(ranks, loads, 17), 11);
  EXPECT_EQ(fill_level<int64_t>(ranks, loads, 19), 11);
  EXPECT_EQ(fill_level<int64_t>(std::vector<uint32_t>{1}, loads, 1), 1000);
}

TEST(EvenSplit, SettlesOverSetsThatOverlap) {
  // Rank 0 could write most, yet what only 1 and 2 share must stay there.
  HolderSets sets;
  add(sets, {0, 1});
  add(sets, {1, 2});
  add(sets, {2, 3});
  const std::vector<uint32_t> order = {0, 1, 2};
  const std::vector<int64_t> bytes = {1000, 2000, 1000};
  std::vector<int64_t> loads = {0, 0, 0, 0};
  const std::vector<int64_t> parts = split_evenly(sets, order, bytes, loads);
  EXPECT_EQ(std::accumulate(loads.begin(), loads.end(), int64_t{0}), 4000);
  for (size_t set = 0; set < 3; ++set) EXPECT_EQ(parts[2 * set] + parts[2 * set + 1], bytes[set]);
  for (const int64_t load : loads) EXPECT_NEAR(static_cast<double>(load), 1000, 20);
}

struct Placed {
  std::vector<std::vector<Share>> shares;
  std::vector<int32_t> dims;
  std::vector<int64_t> loads;
};

// A chunk of rows of equal size, or with more dimensions.
SharedChunk chunk_of(uint32_t set, int64_t bytes, std::initializer_list<int64_t> size) {
  static std::deque<std::vector<int64_t>> sizes;  // spans into it stay
  return {set, bytes, sizes.emplace_back(size)};
}

Placed place(const HolderSets& sets, std::vector<int64_t> loads, const std::vector<SharedChunk>& chunks,
             int64_t least = kMiB) {
  Balance balance(sets, loads, static_cast<uint64_t>(least));
  balance.place(chunks);
  Placed placed{{}, {}, std::move(loads)};
  for (size_t i = 0; i < chunks.size(); ++i) {
    const auto& [dim, shares] = balance.shares(i);
    placed.shares.emplace_back(shares.begin(), shares.end());
    placed.dims.push_back(dim);
    EXPECT_EQ(dim < 0, shares.size() == 1);
    const int64_t rows = dim < 0 ? 1 : chunks[i].size[static_cast<size_t>(dim)];
    int64_t next = 0;
    for (const Share& share : shares) {
      EXPECT_EQ(share.start, next);
      next += share.length;
      placed.loads[share.rank] += share.length * (chunks[i].bytes / rows);
    }
    EXPECT_EQ(next, rows);
  }
  return placed;
}

TEST(Balance, SplitsNothingThatBalancesWhole) {
  HolderSets sets;
  const uint32_t all = add(sets, {0, 1, 2, 3});
  const std::vector<SharedChunk> chunks(8, chunk_of(all, 100 * kMiB, {1024}));
  const Placed placed = place(sets, {0, 0, 0, 0}, chunks);
  for (const auto& shares : placed.shares) EXPECT_EQ(shares.size(), 1u);
  for (const int64_t load : placed.loads) EXPECT_EQ(load, 200 * kMiB);
}

TEST(Balance, SplitsOnRowBorders) {
  HolderSets sets;
  const uint32_t all = add(sets, {0, 1, 2});
  const std::vector<SharedChunk> chunks = {chunk_of(all, 100 * kMiB, {1024})};
  const Placed placed = place(sets, {0, 0, 0}, chunks);
  ASSERT_EQ(placed.shares[0].size(), 3u);
  for (const int64_t load : placed.loads) EXPECT_NEAR(static_cast<double>(load) / kMiB, 33.3, 0.7);
}

TEST(Balance, FillsGaps) {
  HolderSets sets;
  const uint32_t all = add(sets, {0, 1, 2});
  const std::vector<SharedChunk> chunks = {chunk_of(all, 100 * kMiB, {1024})};
  const Placed placed = place(sets, {80 * kMiB, 0, 30 * kMiB}, chunks);
  EXPECT_EQ(placed.shares[0].size(), 2u);  // rank 0 has more than enough
  EXPECT_NEAR(static_cast<double>(placed.loads[1]) / kMiB, 65, 0.5);
  EXPECT_NEAR(static_cast<double>(placed.loads[2]) / kMiB, 65, 0.5);
}

TEST(Balance, PiecesAreNotTooSmall) {
  HolderSets sets;
  const uint32_t all = add(sets, {0, 1, 2, 3, 4, 5, 6, 7});
  for (const int64_t bytes : {3 * kMiB, 5 * kMiB, 20 * kMiB}) {
    const std::vector<SharedChunk> chunks = {chunk_of(all, bytes, {bytes / 4096})};
    const Placed placed = place(sets, std::vector<int64_t>(8), chunks);
    for (const Share& share : placed.shares[0]) {
      EXPECT_GE(share.length * 4096, kMiB) << bytes;
    }
  }
  const std::vector<SharedChunk> small = {chunk_of(all, 2 * kMiB - 4096, {511})};  // two pieces would be too small
  EXPECT_EQ(place(sets, std::vector<int64_t>(8), small).shares[0].size(), 1u);
  const std::vector<SharedChunk> single = {chunk_of(all, 100 * kMiB, {1})};
  EXPECT_EQ(place(sets, std::vector<int64_t>(8), single).shares[0].size(), 1u);
}

TEST(Balance, LargerSetsFillTheGapsOfSmallerOnes) {
  HolderSets sets;
  const uint32_t all = add(sets, {0, 1, 2, 3}), pair = add(sets, {0, 1});
  const std::vector<SharedChunk> chunks = {chunk_of(all, 60 * kMiB, {640}), chunk_of(pair, 40 * kMiB, {320})};
  const Placed placed = place(sets, {0, 0, 0, 0}, chunks);
  for (const int64_t load : placed.loads) EXPECT_NEAR(static_cast<double>(load) / kMiB, 25, 0.5);
}

TEST(Balance, WhatCannotBeSplitIsWorkedAround) {
  HolderSets sets;
  const uint32_t all = add(sets, {0, 1, 2, 3}), pair = add(sets, {0, 1});
  std::vector<SharedChunk> chunks(60, chunk_of(all, kMiB, {1}));
  chunks.push_back(chunk_of(pair, 40 * kMiB, {1}));
  EXPECT_EQ(place(sets, {0, 0, 0, 0}, chunks).loads,
            (std::vector<int64_t>{40 * kMiB, 20 * kMiB, 20 * kMiB, 20 * kMiB}));
}

TEST(Balance, LongerDimsAreCutWhereTheFirstIsTooCoarse) {
  HolderSets sets;
  const uint32_t all = add(sets, {0, 1, 2, 3, 4, 5, 6, 7});
  const std::vector<SharedChunk> chunks = {chunk_of(all, 448 * kMiB, {2, 1, 14336, 4096}),
                                           chunk_of(all, 224 * kMiB, {2, 14336, 2048})};
  const Placed placed = place(sets, std::vector<int64_t>(8), chunks);
  EXPECT_EQ(placed.dims, (std::vector<int32_t>{2, 1}));
  for (const int64_t load : placed.loads) EXPECT_NEAR(static_cast<double>(load) / kMiB, 84, 0.5);
}

TEST(Balance, FewRowsOfTheFirstDimAreCutWhereTheyAreEven) {
  HolderSets sets;
  const uint32_t all = add(sets, {0, 1, 2, 3});
  const std::vector<SharedChunk> chunks = {chunk_of(all, 400 * kMiB, {8, 100, 1024})};
  const Placed placed = place(sets, std::vector<int64_t>(4), chunks);
  EXPECT_EQ(placed.dims[0], 0);
  for (const int64_t load : placed.loads) EXPECT_EQ(load, 100 * kMiB);
}

TEST(Balance, PiecesAreNotShredded) {
  HolderSets sets;
  const uint32_t all = add(sets, {0, 1, 2, 3, 4, 5, 6, 7});
  // 604 rows are uneven on eight ranks, but pieces of the last dimension would be 1812 runs of 1000 bytes.
  const std::vector<SharedChunk> chunks = {chunk_of(all, 604 * 3 * 8000, {604, 3, 8000})};
  EXPECT_EQ(place(sets, std::vector<int64_t>(8), chunks).dims[0], 0);
  EXPECT_EQ(place(sets, std::vector<int64_t>(8), chunks, 1024).dims[0], 2);  // smaller runs are allowed
}

}  // namespace
}  // namespace vescale_ckpt::plan
