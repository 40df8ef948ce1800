// Bytes over ranks for real models: each case in which stock planning, or whole tensors however placed, are uneven.
#include <gtest/gtest.h>

#include "plan/models.h"

namespace vescale_ckpt::plan {
namespace {

constexpr double kMostOverMean = 1.02;

void expect_even(const std::string& what, const Ranks& ranks) {
  const GlobalPlan plan = ranks.plan();
  EXPECT_LE(max_over_mean(plan), kMostOverMean) << what;
}

TEST(BalanceTable, Replicated) {
  expect_even("8B on 8", replicated_llama(kLlama8B, false, 8));
  expect_even("8B on 64", replicated_llama(kLlama8B, false, 64));
  expect_even("8B + Adam on 8", replicated_llama(kLlama8B, true, 8));
  expect_even("70B on 8", replicated_llama(kLlama70B, false, 8));
  expect_even("1B + Adam on 8", replicated_llama(kLlama1B, true, 8));
}

TEST(BalanceTable, FewLayersAndLargeTables) {
  Llama model = kLlama70B;
  model.layers = 4;
  expect_even("4 layers of 70B and two tables on 8", replicated_llama(model, false, 8));
  expect_even("4 layers of 70B and two tables on 64", replicated_llama(model, false, 64));
}

TEST(BalanceTable, ALargeTableBehindSmallMatrices) {
  for (const size_t count : {8u, 64u}) {
    Ranks ranks(count);
    for (int i = 0; i < 64; ++i) ranks.replicated("small." + std::to_string(i), {1024, 1024}, "bfloat16");
    ranks.replicated("table", {128256, 8192}, "bfloat16");
    expect_even("64 small matrices, then a table on " + std::to_string(count), ranks);
  }
}

TEST(BalanceTable, HybridShards) {
  expect_even("HSDP 2 x 4, 8B + Adam", hsdp_llama(kLlama8B, true, 2, 4));
  expect_even("HSDP 8 x 8, 8B + Adam", hsdp_llama(kLlama8B, true, 8, 8));
}

TEST(BalanceTable, TensorParallel) {
  expect_even("70B, TP 8 x DP 8", tensor_parallel_llama(kLlama70B, false, 8, 8));
}

TEST(BalanceTable, MixtureOfExperts) {
  expect_even("EP 4 x DP 2", mixture_of_experts(4, 2));
  expect_even("EP 4 x DP 8", mixture_of_experts(4, 8));
}

// Stacked experts have few rows along their first dimension, each a hundred MiB.
TEST(BalanceTable, FewLayersOfStackedExperts) {
  for (const int64_t layers : {1, 2, 6}) {
    expect_even(std::to_string(layers) + " layers, EP 4 x DP 8", stacked_experts(4, 8, layers));
  }
}

// Rows and columns of one mesh: sets of holders that overlap and are not nested, and uneven to start with.
TEST(BalanceTable, BothWaysOverAMesh) {
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
  expect_even("rows and columns of a mesh", ranks);
}

}  // namespace
}  // namespace vescale_ckpt::plan
