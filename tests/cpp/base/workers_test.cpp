#include "base/workers.h"

#include <gtest/gtest.h>

#include <chrono>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "error_of.h"

namespace vescale_ckpt {
namespace {

using namespace std::chrono_literals;

TEST(Workers, RunOnThreadsOfTheirOwnAndTheCaller) {
  std::mutex mutex;
  std::set<std::thread::id> threads;
  std::atomic<unsigned> inside{0};
  run_workers(4, [&](const std::atomic<bool>&) {
    ++inside;
    while (inside < 4) std::this_thread::yield();  // all at the same time
    const std::lock_guard lock(mutex);
    threads.insert(std::this_thread::get_id());
  });
  EXPECT_EQ(threads.size(), 4u);
  EXPECT_TRUE(threads.contains(std::this_thread::get_id()));
}

TEST(Workers, OneIsTheCaller) {
  for (const unsigned count : {0u, 1u}) {
    unsigned calls = 0;
    run_workers(count, [&](const std::atomic<bool>& stop) {
      ++calls;
      EXPECT_FALSE(stop);
    });
    EXPECT_EQ(calls, 1u) << count;
  }
}

TEST(Workers, AnErrorStopsTheOthersAndReachesTheCaller) {
  std::atomic<unsigned> number{0}, stopped{0};
  const Error error = error_of([&] {
    run_workers(4, [&](const std::atomic<bool>& stop) {
      if (number++ == 2) throw Error(Error::Kind::full, "no space", "a/file", 7, ENOSPC, 3);
      while (!stop) std::this_thread::yield();
      ++stopped;
    });
  });
  EXPECT_EQ(error.kind, Error::Kind::full);
  EXPECT_STREQ(error.what(), "no space");
  EXPECT_EQ(error.path, "a/file");
  EXPECT_EQ(error.offset, 7u);
  EXPECT_EQ(error.code, ENOSPC);
  EXPECT_EQ(error.item, 3);
  EXPECT_EQ(stopped, 3u);
}

TEST(Workers, TheFirstOfManyErrorsCounts) {
  std::atomic<bool> thrown{false};
  try {
    run_workers(4, [&](const std::atomic<bool>& stop) {
      if (!thrown.exchange(true)) throw std::runtime_error("first");
      while (!stop) std::this_thread::yield();
      throw std::runtime_error("later");
    });
    FAIL() << "nothing was thrown";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "first");
  }
}

TEST(WorkQueue, GivesEachItemOnceInOrder) {
  WorkQueue<int> queue;
  queue.expect(3);
  for (const int item : {5, 6, 7}) queue.push(item);
  int item = 0;
  EXPECT_TRUE(queue.take(item));
  EXPECT_EQ(item, 5);
  EXPECT_TRUE(queue.take(item));
  EXPECT_EQ(item, 6);
  EXPECT_TRUE(queue.take(item));
  EXPECT_EQ(item, 7);
  EXPECT_FALSE(queue.take(item));  // all expected were taken: no waiting
}

TEST(WorkQueue, CloseWakesThoseWhoWait) {
  WorkQueue<int> queue;
  queue.expect(5);
  std::atomic<int> refused{0};
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < 3; ++i) {
      threads.emplace_back([&] {
        int item = 0;
        if (!queue.take(item)) ++refused;
      });
    }
    std::this_thread::sleep_for(10ms);
    queue.close();
  }
  EXPECT_EQ(refused, 3);
  queue.push(1);
  int item = 0;
  EXPECT_FALSE(queue.take(item));
}

// Items that make other items ready, as the interior of a large record does its end.
TEST(WorkQueue, FeedsManyWorkersThatFeedIt) {
  constexpr int kItems = 3000;
  WorkQueue<int> queue;
  queue.expect(2 * kItems);
  for (int item = 0; item < kItems; ++item) queue.push(item);
  std::vector<std::atomic<int>> taken(2 * kItems);
  run_workers(4, [&](const std::atomic<bool>&) {
    int item = 0;
    while (queue.take(item)) {
      ++taken[static_cast<size_t>(item)];
      if (item < kItems) queue.push(item + kItems);
    }
  });
  for (const auto& count : taken) ASSERT_EQ(count, 1);
}

}  // namespace
}  // namespace vescale_ckpt
