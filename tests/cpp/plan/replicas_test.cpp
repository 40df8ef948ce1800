#include "plan/replicas.h"

#include <gtest/gtest.h>

#include <numeric>

#include "ranks.h"

namespace vescale_ckpt::plan {
namespace {

using Hashes = std::vector<std::vector<uint64_t>>;

struct Job {
  std::vector<std::vector<std::byte>> packed;
  GlobalPlan plan;

  // The sum over all ranks, if their items have these hashes at a later save.
  uint64_t sum(const Hashes& hashes) const {
    uint64_t total = 0;
    for (uint32_t rank = 0; rank < packed.size(); ++rank) {
      for (const auto& [item, factor] : replica_summands(state::Inventory{packed[rank]}, plan.holders(rank))) {
        total += factor * hashes[rank][item];
      }
    }
    return total;
  }
};

// Chunks of rows on ranks (0, 1) and (2, 3), a tensor on all, another on ranks 1 and 3, an object.
Job job(const Hashes& hashes) {
  Ranks ranks(4);
  for (size_t rank = 0; rank < 4; ++rank) {
    ranks.shard(rank, "rows", {4, 2}, {static_cast<int64_t>(rank / 2 * 2), 0}, {2, 2});
    ranks.tensor(rank, "all", {3});
    if (rank % 2 == 1) ranks.tensor(rank, "odd", {5});
    ranks.object(rank, "object");
  }
  return {ranks.packed(), ranks.plan({}, hashes)};
}

const Hashes kEqual = {{7, 3, 0}, {7, 3, 5, 0}, {8, 3, 0}, {8, 3, 5, 0}};

TEST(Replicas, AddUpToNothingIfAllHoldersAreEqual) {
  const Job equal = job(kEqual);
  EXPECT_TRUE(equal.plan.differences().empty());
  EXPECT_EQ(equal.sum(kEqual), 0u);
  EXPECT_EQ(equal.sum({{1, 2, 0}, {1, 2, 9, 0}, {5, 2, 0}, {5, 2, 9, 0}}), 0u);
  for (size_t rank = 0; rank < 4; ++rank) {
    for (size_t item = 0; item + 1 < kEqual[rank].size(); ++item) {
      Hashes other = kEqual;
      ++other[rank][item];
      EXPECT_NE(equal.sum(other), 0u) << rank << " " << item;
    }
  }
}

TEST(Replicas, ThatDifferAreNamedWithTwoRanksAndNotComparedAgain) {
  Hashes hashes = kEqual;
  hashes[3] = {9, 3, 6, 0};
  const Job found = job(hashes);
  ASSERT_EQ(found.plan.differences().size(), 2u);
  const Difference rows = found.plan.differences()[0], odd = found.plan.differences()[1];
  EXPECT_EQ(found.plan.key(rows.key), "rows");
  EXPECT_EQ((std::pair{rows.one, rows.other}), (std::pair{2u, 3u}));
  EXPECT_EQ(found.plan.key(odd.key), "odd");
  EXPECT_EQ((std::pair{odd.one, odd.other}), (std::pair{1u, 3u}));
  EXPECT_EQ(found.sum(hashes), 0u);
  ++hashes[2][1];
  EXPECT_NE(found.sum(hashes), 0u);
}

TEST(Replicas, AreComparedHoweverManySetsOfRanksHoldThem) {
  constexpr size_t kPairs = 300;  // rank 0 holds a tensor with each of the others
  Ranks ranks(kPairs + 1);
  Hashes hashes(kPairs + 1);
  for (size_t rank = 1; rank <= kPairs; ++rank) {
    for (size_t holder = 0; holder <= kPairs; ++holder) {  // the first so many ranks
      if (holder <= rank) ranks.tensor(holder, std::to_string(rank), {3});
      if (holder <= rank) hashes[holder].push_back(rank);
    }
  }
  const Job job{ranks.packed(), ranks.plan({}, hashes)};
  EXPECT_EQ(job.plan.holders(0).size(), 4 + (kPairs + 1) * sizeof(HolderPlace) + kPairs * 2);
  EXPECT_EQ(job.sum(hashes), 0u);
  ++hashes[0][kPairs - 1];
  EXPECT_NE(job.sum(hashes), 0u);
}

TEST(Replicas, HaveNoHoldersWithoutHashes) {
  const Job none = job({});
  for (uint32_t rank = 0; rank < 4; ++rank) EXPECT_TRUE(none.plan.holders(rank).empty());
  EXPECT_THROW(job({{1}}), Error);
  EXPECT_THROW(job({{1}, {}, {}, {}}), Error);
}

TEST(Replicas, OfAnotherInventoryAreRefused) {
  const Job equal = job(kEqual);
  const state::Inventory other{equal.packed[0]};
  EXPECT_THROW(replica_summands(other, equal.plan.holders(1)), Error);
  EXPECT_THROW(replica_summands(other, std::vector<std::byte>(3)), Error);
  std::vector<std::byte> holders = equal.plan.holders(0);
  holders[holders.size() - 3 * sizeof(uint16_t)] = std::byte{99};  // the place of item 0
  EXPECT_THROW(replica_summands(other, holders), Error);
}

}  // namespace
}  // namespace vescale_ckpt::plan
