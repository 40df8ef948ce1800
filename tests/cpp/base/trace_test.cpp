#include "base/trace.h"

#include <gtest/gtest.h>

#include <barrier>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace vescale_ckpt::trace {
namespace {

class TraceTest : public testing::Test {
 protected:
  void SetUp() override {
    take();
    enable(true);
  }
  void TearDown() override {
    enable(false);
    take();
  }
};

TEST_F(TraceTest, RecordsOneStepAfterAnother) {
  Laps laps;
  laps.lap(Step::checksum, 10);
  laps.lap(Step::write, 20);
  const Taken taken = take();
  ASSERT_EQ(taken.spans.size(), 2u);
  EXPECT_EQ(std::string(name_of(taken.spans[0].step)), "checksum");
  EXPECT_EQ(std::string(name_of(taken.spans[1].step)), "write");
  EXPECT_LE(taken.spans[0].begin, taken.spans[0].end);
  EXPECT_EQ(taken.spans[0].end, taken.spans[1].begin);
  EXPECT_EQ(taken.spans[1].bytes, 20u);
  EXPECT_TRUE(take().spans.empty());
}

TEST_F(TraceTest, LeavesOutWhatIsSkipped) {
  Laps laps;
  laps.lap(Step::read, 1);
  laps.skip();
  laps.lap(Step::verify, 1);
  const Taken taken = take();
  ASSERT_EQ(taken.spans.size(), 2u);
  EXPECT_GE(taken.spans[1].begin, taken.spans[0].end);
}

TEST_F(TraceTest, RecordsNothingWhileItIsOff) {
  enable(false);
  Laps laps;
  laps.lap(Step::write, 1);
  enable(true);
  laps.lap(Step::write, 1);  // it began before
  EXPECT_TRUE(take().spans.empty());
}

TEST_F(TraceTest, GivesEachOfSeveralThreadsALane) {
  constexpr int kThreads = 4;
  for (int round = 0; round < 2; ++round) {
    std::barrier<> all(kThreads);
    {
      std::vector<std::jthread> threads;
      for (int number = 0; number < kThreads; ++number) {
        threads.emplace_back([&] {
          Laps().lap(Step::copy, 0);
          all.arrive_and_wait();
        });
      }
    }
    std::set<uint32_t> lanes;
    for (const Span& span : take().spans) lanes.insert(span.lane);
    EXPECT_EQ(lanes.size(), static_cast<size_t>(kThreads));
    EXPECT_LE(*lanes.rbegin(), static_cast<uint32_t>(kThreads));  // the main thread may have one, too
  }
}

TEST_F(TraceTest, CountsWhatItHasNoRoomFor) {
  Laps laps;
  for (size_t span = 0; span < kMostSpans + 3; ++span) laps.lap(Step::write, 0);
  const Taken taken = take();
  EXPECT_EQ(taken.spans.size(), kMostSpans);
  EXPECT_EQ(taken.dropped, 3u);
}

}  // namespace
}  // namespace vescale_ckpt::trace
