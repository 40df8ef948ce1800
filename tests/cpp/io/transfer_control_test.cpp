#include "io/transfer_control.h"

#include <gtest/gtest.h>

namespace vescale_ckpt::io {
namespace {

using namespace std::chrono_literals;
using Time = RateLimit::Time;

class RateLimitTest : public ::testing::Test {
 protected:
  RateLimit limit(uint64_t bytes_per_second) {
    return RateLimit(bytes_per_second, [this] { return now_; });
  }
  Time now_ = 5s;
};

TEST_F(RateLimitTest, IsOffAtZero) {
  RateLimit none = limit(0);
  for (int i = 0; i < 10; ++i) EXPECT_EQ(none.take(uint64_t{1} << 60), 0s);
}

TEST_F(RateLimitTest, SpreadsTransfersOverTime) {
  RateLimit thousand = limit(1000);
  EXPECT_EQ(thousand.take(500), 0s);
  EXPECT_EQ(thousand.take(1000), 500ms - RateLimit::kBurst);
  EXPECT_EQ(thousand.take(1), 1500ms - RateLimit::kBurst);
  now_ += 1401ms;  // all is paid for
  EXPECT_EQ(thousand.take(100), 0s);
  EXPECT_EQ(thousand.take(1), 100ms);
}

// Whoever waits as long as it is told moves no more than the rate, but for the first transfer and one burst.
TEST_F(RateLimitTest, HoldsInTheLongRun) {
  constexpr uint64_t kRate = 3'000'000, kPiece = 8 << 20;
  RateLimit three = limit(kRate);
  const Time start = now_;
  uint64_t moved = 0;
  for (int i = 0; i < 1000; ++i) {
    now_ += three.take(kPiece);
    moved += kPiece;
  }
  const double seconds = std::chrono::duration<double>(now_ - start + RateLimit::kBurst).count();
  EXPECT_NEAR(static_cast<double>(moved - kPiece) / seconds, kRate, 1);
}

TEST_F(RateLimitTest, CatchesUpWithABurstAndNoMore) {
  RateLimit thousand = limit(1000);
  EXPECT_EQ(thousand.take(100), 0s);
  now_ += 1h;
  uint64_t at_once = 0;
  while (thousand.take(10) == 0s) at_once += 10;
  EXPECT_EQ(at_once, 110u);  // a tenth of a second's, and the one that goes into debt
}

TEST_F(RateLimitTest, NeverOverflows) {
  RateLimit one = limit(1);
  EXPECT_EQ(one.take(~uint64_t{0}), 0s);
  EXPECT_GT(one.take(~uint64_t{0}), 24h);
  EXPECT_GT(one.take(1), 24h);
}

TEST(RateLimit, RunsOnARealClock) {
  RateLimit slow(1);
  EXPECT_EQ(slow.take(1000), 0s);
  EXPECT_GT(slow.take(1), 500s);
}

}  // namespace
}  // namespace vescale_ckpt::io
