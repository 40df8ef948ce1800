// What is told when ranks do not fit together, and what empty chunks come to.
#include "plan/layout.h"

#include <gtest/gtest.h>

#include "error_of.h"
#include "plan/ranks.h"

namespace vescale_ckpt::plan {
namespace {

TEST(Merge, TellsShapesApart) {
  Ranks ranks(8);
  ranks.tensor(0, "decoder.weight", {4, 8});
  for (const size_t rank : {3u, 5u, 6u, 7u}) ranks.tensor(rank, "decoder.weight", {4, 16});
  EXPECT_EQ(refusal(ranks), "decoder.weight: rank 0 has shape (4, 8), ranks 3, 5-7 have (4, 16)");
}

TEST(Merge, TellsDtypesApart) {
  Ranks ranks(3);
  ranks.tensor(0, "w", {4});
  ranks.tensor(1, "w", {4}, "int32");
  ranks.tensor(2, "w", {4}, "bfloat16");
  EXPECT_EQ(refusal(ranks), "w: rank 0 has dtype float32, rank 1 has int32, rank 2 has bfloat16");
}

TEST(Merge, TellsKindsApart) {
  Ranks ranks(2);
  ranks.object(0, "x");
  ranks.tensor(1, "x", {2});
  EXPECT_EQ(refusal(ranks), "x: rank 0 has an object, rank 1 has a tensor");
}

TEST(Merge, CountsEachKeyOfEqualRows) {
  Ranks ranks(3);
  for (const size_t rank : {0u, 1u, 2u}) {
    for (const char* name : {"fine", "b", "a", "c"}) {
      const bool wrong = rank == 2 && std::string_view(name) != "fine";
      ranks.tensor(rank, name, {wrong ? 4 : 3});
    }
    ranks.tensor(rank, "overlaps not", {3});
  }
  EXPECT_EQ(refusal(ranks), "b: ranks 0, 1 have shape (3,), rank 2 has (4,) (and 2 more keys have faults)");
}

TEST(Merge, KeysOfEqualRowsAreToldApartByOtherRanks) {
  // Rank 0 has equal rows of all three, rank 1 of two, and rank 2 has one of them only.
  Ranks ranks(3);
  for (const char* name : {"a", "b", "c"}) ranks.shard(0, name, {4}, {0}, {2});
  ranks.shard(1, "c", {4}, {2}, {1});
  ranks.shard(1, "a", {4}, {2}, {2});
  ranks.shard(1, "b", {4}, {2}, {2});
  ranks.shard(2, "b", {4}, {2}, {2});
  ranks.shard(2, "c", {4}, {3}, {1});
  const PlanOptions lowest{Placement::lowest_rank};
  EXPECT_EQ(owners(ranks.plan(lowest).catalog()), (Owners{{"a (0) (2)", 0},
                                                          {"a (2) (2)", 1},
                                                          {"b (0) (2)", 0},
                                                          {"b (2) (2)", 1},
                                                          {"c (0) (2)", 0},
                                                          {"c (2) (1)", 1},
                                                          {"c (3) (1)", 2}}));
}

TEST(Merge, AWholeTensorMayBeAShardElsewhere) {
  Ranks ranks(2);
  ranks.tensor(0, "w", {4});
  ranks.shard(1, "w", {4}, {0}, {4});
  EXPECT_EQ(owners(ranks.plan().catalog()), (Owners{{"w (0) (4)", 0}}));
}

TEST(Merge, FlagsOfTheFirstRankCount) {
  Ranks ranks(2);
  const Dims shape = {2}, zero = {0};
  ranks.builder(0).add({"w", state::ItemKind::tensor, 0, state::kRequiresGrad, 8, shape, zero, shape});
  ranks.builder(1).add({"w", state::ItemKind::tensor, 0, 0, 8, shape, zero, shape});
  EXPECT_EQ(ranks.plan().catalog().keys[0].flags, state::kRequiresGrad);
}

TEST(Merge, RefusesChunksOutOfBounds) {
  for (const auto& [offset, size] : std::vector<std::pair<Dims, Dims>>{{{0, 4}, {2, 5}},
                                                                       {{3, 0}, {0, 0}},
                                                                       {{-1, 0}, {1, 1}},
                                                                       {{0, 0}, {-1, 8}},
                                                                       {{1, INT64_MAX}, {1, INT64_MAX}},
                                                                       {{INT64_MIN, 0}, {INT64_MIN, 1}}}) {
    Ranks ranks(2);
    ranks.tensor(0, "w", {2, 8});
    const Dims shape = {2, 8};
    const auto bytes = static_cast<uint64_t>(size[0]) * static_cast<uint64_t>(size[1]) * 4;
    ranks.builder(1).add({"w", state::ItemKind::shard, 0, 0, bytes & INT64_MAX, shape, offset, size});
    const std::string text = refusal(ranks);
    EXPECT_TRUE(text.starts_with("w: rank 1 has the chunk at offset (")) << text;
    EXPECT_TRUE(text.ends_with("which is not within the shape (2, 8)")) << text;
  }
}

TEST(Merge, RefusesShapesThatNoTensorHas) {
  for (const Dims& shape :
       {Dims{-1}, Dims{0, -1}, Dims{INT64_MAX}, Dims{int64_t{1} << 32, int64_t{1} << 32}, Dims(64, INT64_MAX)}) {
    Ranks ranks(2);
    const Dims zero(shape.size());
    for (const size_t rank : {0u, 1u})
      ranks.builder(rank).add({"w", state::ItemKind::shard, 0, 0, 0, shape, zero, zero});
    EXPECT_TRUE(refusal(ranks).starts_with("w: a tensor cannot have the shape (")) << refusal(ranks);
  }
}

TEST(Merge, RefusesBytesThatAreNotTheChunks) {
  Ranks ranks(1);
  const Dims shape = {2, 3}, zero = {0, 0};
  ranks.builder(0).add({"w", state::ItemKind::tensor, 0, 0, 23, shape, zero, shape});
  EXPECT_EQ(refusal(ranks),
            "w: rank 0 has the chunk at offset (0, 0) of size (2, 3) in 23 bytes, which are not 4 an element");
}

TEST(Merge, RefusesAPartAsAWholeTensor) {
  Ranks ranks(2);
  const Dims shape = {4}, zero = {0}, half = {2};
  ranks.tensor(0, "w", {4});
  ranks.builder(1).add({"w", state::ItemKind::tensor, 0, 0, 8, shape, zero, half});
  EXPECT_EQ(refusal(ranks), "w: rank 1 has the chunk at offset (0,) of size (2,) as a whole tensor of shape (4,)");
}

TEST(Merge, TellsWhatIsHeldByNoRank) {
  Ranks ranks(4);
  for (const size_t rank : {0u, 1u}) {
    ranks.shard(rank, "w", {4, 8}, {static_cast<int64_t>(rank) * 2, 0}, {2, 4});
    ranks.shard(rank + 2, "w", {4, 8}, {0, 4}, {2, 4});
  }
  EXPECT_EQ(
      refusal(ranks),
      "w: 8 elements are held by no rank, such as those at offset (2, 4) of size (2, 4) (ranks 0-3 hold the rest)");
}

TEST(Merge, ARankAloneHoldsWhatItHolds) {
  Ranks ranks(1);
  ranks.shard(0, "w", {4, 8}, {0, 4}, {2, 4});
  ranks.shard(0, "w", {4, 8}, {2, 0}, {2, 2});
  EXPECT_EQ(owners(ranks.plan().catalog()), (Owners{{"w (0,4) (2,4)", 0}, {"w (2,0) (2,2)", 0}}));
  ranks.shard(0, "w", {4, 8}, {1, 1}, {2, 2});
  EXPECT_TRUE(refusal(ranks).ends_with("they overlap"));
}

TEST(Merge, TellsWhatOverlaps) {
  Ranks ranks(4);
  for (const size_t rank : {0u, 1u, 2u}) ranks.shard(rank, "w", {4, 8}, {0, 0}, {3, 8});
  ranks.shard(3, "w", {4, 8}, {2, 0}, {2, 8});
  EXPECT_EQ(refusal(ranks),
            "w: ranks 0-2 have offset (0, 0) of size (3, 8), rank 3 has offset (2, 0) of size (2, 8): they overlap");
}

TEST(Merge, TellsChunksOfOneOffsetApart) {
  Ranks ranks(3);
  ranks.shard(0, "w", {4}, {0}, {2});
  ranks.shard(1, "w", {4}, {0}, {4});
  ranks.shard(2, "w", {4}, {0}, {2});
  EXPECT_EQ(refusal(ranks),
            "w: rank 0 has offset (0,) of size (2,), rank 1 has offset (0,) of size (4,): they overlap");
}

TEST(Merge, RefusesWhatARankHasTwice) {
  Ranks ranks(2);
  ranks.replicated("w", {4});
  ranks.tensor(1, "w", {4});
  EXPECT_EQ(refusal(ranks), "w: rank 1 has offset (0,) of size (4,) twice");
  Ranks objects(1);
  objects.object(0, "x");
  objects.object(0, "x");
  EXPECT_EQ(refusal(objects), "x: rank 0 has it twice");
}

TEST(Merge, EmptyChunksCountOnlyWhereThereIsNothingElse) {
  Ranks ranks(4);
  // As DTensor shards a dimension of 2 over 4 ranks: the empty ones start where it ends. Here one starts where a full
  // one does as well.
  ranks.shard(0, "w", {2, 3}, {0, 0}, {1, 3});
  ranks.shard(1, "w", {2, 3}, {1, 0}, {1, 3});
  ranks.shard(2, "w", {2, 3}, {2, 0}, {0, 3});
  ranks.shard(3, "w", {2, 3}, {1, 0}, {0, 3});
  for (size_t rank = 0; rank < 4; ++rank) ranks.shard(rank, "none", {0, 3}, {0, 0}, {0, 3});
  ranks.shard(2, "other", {5, 0}, {0, 0}, {3, 0});
  ranks.shard(3, "other", {5, 0}, {3, 0}, {2, 0});
  const GlobalPlan plan = ranks.plan();
  const Owners found = owners(plan.catalog());
  EXPECT_EQ(found.size(), 4u);
  EXPECT_EQ(found.at("w (0,0) (1,3)"), 0u);
  EXPECT_EQ(found.at("w (1,0) (1,3)"), 1u);
  EXPECT_TRUE(found.contains("none (0,0) (0,3)"));
  EXPECT_EQ(found.at("other (0,0) (3,0)"), 2u);
}

TEST(Merge, OnlyEmptyChunksDoNotCoverATensor) {
  Ranks ranks(2);
  for (const size_t rank : {0u, 1u}) ranks.shard(rank, "w", {4}, {0}, {0});
  EXPECT_TRUE(refusal(ranks).starts_with("w: 4 elements are held by no rank")) << refusal(ranks);
}

TEST(Merge, KeysStandInOrderOfFirstAppearance) {
  Ranks ranks(3);
  ranks.tensor(0, "c", {1});
  ranks.tensor(1, "a", {1});
  ranks.tensor(1, "c", {1});
  ranks.tensor(2, "b", {1});
  const metadata::Catalog catalog = ranks.plan().catalog();
  std::vector<std::string_view> names;
  for (const metadata::Catalog::Key& key : catalog.keys) names.push_back(catalog.name(key));
  EXPECT_EQ(names, (std::vector<std::string_view>{"c", "a", "b"}));
}

TEST(Merge, NamesTheRankOfAMalformedInventory) {
  const std::vector<std::byte> good = state::InventoryBuilder().pack();
  std::vector<std::byte> bad = good;
  bad[0] = std::byte{0};
  const std::vector<state::InventoryParts> views = {{good}, {bad}};
  const std::string text = error_of([&] { const GlobalPlan plan(views, {}); }).what();
  EXPECT_TRUE(text.starts_with("rank 1: "));
}

}  // namespace
}  // namespace vescale_ckpt::plan
