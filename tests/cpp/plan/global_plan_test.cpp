#include "plan/global_plan.h"

#include <gtest/gtest.h>

#include "plan/ranks.h"

namespace vescale_ckpt::plan {
namespace {

using Rows = std::vector<int64_t>;

Rows part(const GlobalPlan& plan, uint32_t rank) {
  Rows rows(plan.local_plan_words(rank));
  plan.local_plan(rank, rows);
  return rows;
}

PlanOptions placed(Placement placement, uint64_t least = uint64_t{1} << 20) {
  return {placement, least};
}

TEST(GlobalPlan, PartsHaveTensorsFirstInTheRanksOwnOrder) {
  Ranks ranks(2);
  ranks.object(0, "x");
  ranks.tensor(0, "b", {2});
  ranks.tensor(0, "a", {2});
  ranks.object(0, "y");
  ranks.tensor(1, "a", {2});
  ranks.tensor(1, "c", {2});
  ranks.tensor(1, "b", {2});
  const GlobalPlan plan = ranks.plan(placed(Placement::lowest_rank));
  EXPECT_EQ(part(plan, 0), (Rows{1, -1, 0, 0, 2, -1, 0, 0, 0, -1, 0, 0, 3, -1, 0, 0}));
  EXPECT_EQ(part(plan, 1), (Rows{1, -1, 0, 0}));
  const metadata::Catalog catalog = plan.catalog();
  for (const metadata::Catalog::Key& key : catalog.keys) {
    const std::map<std::string_view, uint32_t> rows = {{"x", 2}, {"b", 0}, {"a", 1}, {"y", 3}, {"c", 0}};
    EXPECT_EQ(catalog.chunks[key.first_chunk].row, rows.at(catalog.name(key))) << catalog.name(key);
    EXPECT_EQ(catalog.chunks[key.first_chunk].writer, catalog.name(key) == "c") << catalog.name(key);
  }
  EXPECT_THROW(plan.local_plan_words(2), Error);
}

TEST(GlobalPlan, PiecesAreRowsOfTheFirstDimLongerThanOne) {
  Ranks ranks(2);
  ranks.replicated("w", {1, 10, 8}, "int8");
  const GlobalPlan plan = ranks.plan(placed(Placement::balanced, 1));
  EXPECT_EQ(part(plan, 0), (Rows{0, 1, 0, 5}));
  EXPECT_EQ(part(plan, 1), (Rows{0, 1, 5, 5}));
  EXPECT_EQ(owners(plan.catalog()), (Owners{{"w (0,0,0) (1,5,8)", 0}, {"w (0,5,0) (1,5,8)", 1}}));
}

TEST(GlobalPlan, LowestRankTakesAllAndSplitsNothing) {
  Ranks ranks(3);
  for (const size_t rank : {1u, 2u}) ranks.tensor(rank, "a", {1000, 1000});
  ranks.replicated("b", {1000, 1000});
  const GlobalPlan plan = ranks.plan(placed(Placement::lowest_rank, 1));
  EXPECT_EQ(owners(plan.catalog()), (Owners{{"a (0,0) (1000,1000)", 1}, {"b (0,0) (1000,1000)", 0}}));
}

TEST(GlobalPlan, LocalWritesACopyOnEachNodeThatHoldsIt) {
  Ranks ranks(4, 2);
  ranks.replicated("all", {10}, "int8");
  for (const size_t rank : {2u, 3u}) ranks.tensor(rank, "second", {4}, "int8");
  for (size_t rank = 0; rank < 4; ++rank) ranks.shard(rank, "shards", {4}, {static_cast<int64_t>(rank)}, {1}, "int8");
  const GlobalPlan plan = ranks.plan(placed(Placement::local, 1));
  EXPECT_EQ(part(plan, 2), (Rows{0, 0, 7, 3, 1, -1, 0, 0, 2, -1, 0, 0}));
  EXPECT_EQ(part(plan, 3), (Rows{0, 0, 0, 7, 2, -1, 0, 0}));
  const Owners shards = {{"shards (0) (1)", 0}, {"shards (1) (1)", 1}, {"shards (2) (1)", 2}, {"shards (3) (1)", 3}};
  Owners first = {{"all (0) (5)", 0}, {"all (5) (5)", 1}};
  first.insert(shards.begin(), shards.end());
  for (const auto& [chunk, writer] : owners(plan.catalog())) {
    if (chunk.starts_with("second")) {
      EXPECT_GE(writer, 2u) << chunk;
    } else {
      EXPECT_EQ(first.at(chunk), writer) << chunk;
    }
  }
}

TEST(GlobalPlan, LocalHoldersNeedNotStandNodeByNode) {
  Ranks ranks(4);
  std::vector<std::vector<std::byte>> packed;
  for (size_t rank = 0; rank < 4; ++rank) {
    ranks.tensor(rank, "w", {8}, "int8");
    packed.push_back(ranks.builder(rank).pack(rank % 2 == 0 ? 70 : -3));
  }
  const std::vector<state::InventoryParts> views = {{packed[0]}, {packed[1]}, {packed[2]}, {packed[3]}};
  const GlobalPlan plan(views, placed(Placement::local, 1));
  EXPECT_EQ(owners(plan.catalog()), (Owners{{"w (0) (4)", 1}, {"w (4) (4)", 3}}));  // ids in order: -3, 70
}

TEST(GlobalPlan, ObjectsAreSpread) {
  Ranks ranks(4);
  for (size_t rank = 0; rank < 4; ++rank) {
    for (int i = 0; i < 12; ++i) ranks.object(rank, std::to_string(i));
  }
  const GlobalPlan plan = ranks.plan();
  for (uint32_t rank = 0; rank < 4; ++rank) EXPECT_EQ(plan.local_plan_words(rank), 3 * LocalPlans::kRowWords);
}

TEST(GlobalPlan, ThreadsDoNotShow) {  // enough for several of them
  Ranks ranks(64);
  for (size_t rank = 0; rank < 64; ++rank) {
    for (int i = 0; i < 400; ++i) {
      const std::string name = "model.layers." + std::to_string(i) + ".weight";
      if (i % 3 == 0) {
        ranks.tensor(rank, name, {64, 1024 + i});
      } else {
        ranks.shard(rank, name, {128, 100}, {static_cast<int64_t>(rank % 32) * 4, 0}, {4, 100});
      }
    }
  }
  const GlobalPlan first = ranks.plan(placed(Placement::balanced, 4096));
  for (int run = 0; run < 5; ++run) {
    const GlobalPlan again = ranks.plan(placed(Placement::balanced, 4096));
    for (uint32_t rank = 0; rank < 64; ++rank) EXPECT_EQ(part(again, rank), part(first, rank));
    EXPECT_EQ(owners(again.catalog()), owners(first.catalog()));
  }
  EXPECT_LT(max_over_mean(first), 1.02);
}

// Rows and columns of one mesh: sets of holders that overlap and are not nested, and uneven to start with. Real models
// are in tests/benchmarks/test_stock_plans.py.
TEST(GlobalPlan, IsEvenBothWaysOverAMesh) {
  constexpr size_t kSide = 8;
  Ranks ranks(kSide * kSide);
  for (size_t line = 0; line < kSide; ++line) {
    for (size_t i = 0; i < kSide; ++i) {
      const auto uneven = static_cast<int64_t>(20000 + 5000 * line);
      ranks.tensor(line * kSide + i, "row." + std::to_string(line), {uneven, 1024});
      ranks.tensor(i * kSide + line, "column." + std::to_string(line), {uneven * 2, 1024});
    }
  }
  ranks.replicated("all", {131072, 1024});
  EXPECT_LE(max_over_mean(ranks.plan()), 1.02);
}

}  // namespace
}  // namespace vescale_ckpt::plan
