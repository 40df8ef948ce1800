#include "base/new_memory.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>
#include <vector>

#include "base/memory.h"
#include "base/system.h"
#include "scratch.h"

namespace vescale_ckpt {
namespace {

constexpr uint64_t kFast = 250'000, kMiddle = 500'000, kSlow = 5'000'000;  // nanoseconds

TEST(PageChoice, TakesTheFasterKindAndTriesTheOtherNowAndThen) {
  PageChoice choice;
  EXPECT_TRUE(choice.next_is_huge());
  EXPECT_FALSE(choice.next_is_huge());  // other threads, meanwhile
  choice.took(true, kSlow);
  choice.took(false, kMiddle);
  for (uint64_t step = 2; step < PageChoice::kSteps; ++step) EXPECT_FALSE(choice.next_is_huge());
  EXPECT_TRUE(choice.next_is_huge());
  choice.took(true, kFast);  // the host has memory again
  for (uint64_t step = 1; step < PageChoice::kSteps; ++step) EXPECT_TRUE(choice.next_is_huge());
  EXPECT_FALSE(choice.next_is_huge());
}

// 8 huge pages and a half, the first at the begin.
class NewMemoryTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kBytes = 8 * kHugePage + kHugePage / 2;

  NewMemoryTest() {
    system::inject_fault(Call::populate, ENOMEM, 1000, 1);  // counts
    system::inject_fault(Call::advise, ENOMEM, 1000, 1);
  }
  ~NewMemoryTest() override {
    system::clear_faults();
    ::munmap(map_, kBytes + kHugePage);
  }

  std::byte* data() const {
    return reinterpret_cast<std::byte*>(align_up(reinterpret_cast<uintptr_t>(map_), kHugePage));
  }
  std::span<std::byte> all() const { return {data(), kBytes}; }
  static uint64_t populated() { return system::calls_seen(Call::populate); }
  static uint64_t advised() { return system::calls_seen(Call::advise); }

  PageChoice choice_;

 private:
  void* map_ = ::mmap(nullptr, kBytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
};

TEST_F(NewMemoryTest, TakesEachHugePageOnce) {
  data()[100] = std::byte{7};
  NewMemory memory({all()}, choice_);
  memory.take_pages(data() + kHugePage - 1, 2);  // the last byte of one and the first of the next
  EXPECT_EQ(populated(), 2u);
  memory.take_pages(data(), 2 * kHugePage);
  memory.take_pages(data(), 0);
  EXPECT_EQ(populated(), 2u);
  memory.take_pages(data() + 7 * kHugePage, 2 * kHugePage);  // the end of the memory is not a whole one
  EXPECT_EQ(populated(), 4u);
  EXPECT_EQ(data()[100], std::byte{7});
}

TEST_F(NewMemoryTest, TakesSinglePagesWhereTheyAreFaster) {
  EXPECT_TRUE(choice_.next_is_huge());
  choice_.took(true, UINT64_MAX);
  {
    NewMemory memory({all()}, choice_);
    memory.take_pages(data(), kBytes);
    EXPECT_EQ(populated(), 9u);
    EXPECT_EQ(advised(), 2u);  // for all steps together
  }
  EXPECT_EQ(advised(), 3u);  // huge pages again
  EXPECT_FALSE(choice_.next_is_huge());
}

TEST_F(NewMemoryTest, IsUsableWhereTheSystemTakesNoPages) {
  system::inject_fault(Call::populate, EINVAL, 0, 1000);
  system::inject_fault(Call::advise, EINVAL, 0, 1000);
  NewMemory memory({all()}, choice_);
  memory.take_pages(data(), kBytes);
  EXPECT_EQ(populated(), 9u);
  std::ranges::fill(all(), std::byte{1});
}

TEST_F(NewMemoryTest, KnowsItsRanges) {
  constexpr uint64_t kPiece = kHugePage / 4;
  std::vector<std::span<std::byte>> ranges;
  for (uint64_t i = 8; i-- > 0;) ranges.emplace_back(data() + i * kPiece, kPiece - 16);  // they nearly touch
  ranges.emplace_back(data() + 4 * kHugePage, kHugePage);
  ranges.emplace_back(data() + 6 * kHugePage, kHugePage / 2);  // too small
  ranges.emplace_back();
  NewMemory memory(std::move(ranges), choice_);
  EXPECT_EQ(advised(), 2u);
  memory.take_pages(data() + 2 * kHugePage, kHugePage);
  memory.take_pages(data() + 6 * kHugePage, kHugePage / 2);
  memory.take_pages(data() - 1, 1);
  EXPECT_EQ(populated(), 0u);
  memory.take_pages(data() + 3 * kPiece, 2 * kPiece);
  memory.take_pages(data() + 4 * kHugePage, 4 * kHugePage);
  EXPECT_EQ(populated(), 3u);
  const LargePages pages;
  const uint64_t before = advised();  // more than 2 where the machine was slow with huge pages
  const NewMemory on_large_pages({all().subspan(100)}, choice_);
  EXPECT_EQ(advised(), before + 1);  // a range that begins inside of a page would not be seen
}

TEST_F(NewMemoryTest, IsFilledByThreadsMeanwhile) {
  constexpr size_t kThreads = 4;
  constexpr uint64_t kPart = kBytes / kThreads;
  NewMemory memory({all()}, choice_);
  {
    std::vector<std::jthread> threads;
    for (size_t number = 0; number < kThreads; ++number) {
      threads.emplace_back([&, number] {
        memory.take_pages(data() + number * kPart, kPart);
        std::memset(data() + number * kPart, static_cast<int>(number + 1), kPart);
      });
    }
  }
  EXPECT_EQ(populated(), 9u);
  for (size_t number = 0; number < kThreads; ++number) {
    EXPECT_TRUE(std::ranges::all_of(all().subspan(number * kPart, kPart),
                                    [&](std::byte byte) { return byte == static_cast<std::byte>(number + 1); }));
  }
}

}  // namespace
}  // namespace vescale_ckpt
