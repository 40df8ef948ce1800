#include "base/memory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <future>
#include <optional>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "base/system.h"
#include "scratch.h"

namespace vescale_ckpt {
namespace {

constexpr uint64_t kSlot = 1 << 20;

TEST(Align, RoundsToMultiples) {
  EXPECT_EQ(align_down(0, kBlock), 0u);
  EXPECT_EQ(align_down(4095, kBlock), 0u);
  EXPECT_EQ(align_down(4096, kBlock), 4096u);
  EXPECT_EQ(align_up(0, kBlock), 0u);
  EXPECT_EQ(align_up(1, kBlock), 4096u);
  EXPECT_EQ(next_congruent(0, 64), 64u);
  EXPECT_EQ(next_congruent(64, 64), 64u);
  EXPECT_EQ(next_congruent(65, 64), 4096u + 64);
  EXPECT_EQ(next_congruent(704, 0), 4096u);
  EXPECT_EQ(next_congruent(0, 3 * kBlock + 4032), 4032u);
  EXPECT_EQ(align_up(4096, kBlock), 4096u);
  EXPECT_EQ(align_up((uint64_t{1} << 40) + 1, kBlock), (uint64_t{1} << 40) + kBlock);
}

TEST(Arena, HandsOutAlignedWritableSlots) {
  Arena arena(kSlot + 1, 8 * kSlot);
  EXPECT_EQ(arena.slot_bytes(), kSlot + kBlock);  // whole blocks
  const Slot slot = arena.acquire();
  EXPECT_EQ(reinterpret_cast<uintptr_t>(slot.data()) % kBlock, 0u);
  std::memset(slot.data(), 1, arena.slot_bytes());
  EXPECT_EQ(slot.data()[arena.slot_bytes() - 1], std::byte{1});
}

// Expects that the arena is at its limit: the next slot is the one that is given back.
void expect_full(Arena& arena, std::optional<Slot> last) {
  std::byte* const data = last->data();
  std::future<Slot> next = std::async(std::launch::async, [&] { return arena.acquire(); });
  EXPECT_EQ(next.wait_for(std::chrono::milliseconds(20)), std::future_status::timeout);
  last.reset();
  EXPECT_EQ(next.get().data(), data);
}

TEST(Arena, KeepsToItsBudget) {
  Arena arena(kSlot, 3 * kSlot + kSlot / 2);
  EXPECT_EQ(arena.slots(), 3u);
  std::vector<Slot> slots;
  std::set<std::byte*> places;
  for (int i = 0; i < 3; ++i) places.insert(slots.emplace_back(arena.acquire()).data());
  EXPECT_EQ(places.size(), 3u);
  expect_full(arena, std::move(slots.back()));
}

TEST(Arena, AlwaysAllowsOneSlot) {
  Arena arena(kSlot, 1);
  EXPECT_EQ(arena.slots(), 1u);
  expect_full(arena, arena.acquire());
}

TEST(Arena, KeepsMemoryBetweenUses) {
  Arena arena(kSlot, 4 * kSlot);
  std::byte* first = arena.acquire().data();
  EXPECT_EQ(arena.acquire().data(), first);  // the warmest
}

TEST(Arena, SharesAmongThreads) {
  constexpr unsigned kSlots = 3;
  Arena arena(kSlot, kSlots * kSlot);
  std::atomic<unsigned> out{0}, most{0};
  {
    std::vector<std::jthread> threads;
    for (unsigned thread = 0; thread < 6; ++thread) {
      threads.emplace_back([&] {
        for (int round = 0; round < 200; ++round) {
          const Slot slot = arena.acquire();
          const unsigned now = ++out;
          for (unsigned seen = most; seen < now && !most.compare_exchange_weak(seen, now);) {
          }
          slot.data()[0] = std::byte{1};  // a race if anybody else has it
          --out;
        }
      });
    }
  }
  EXPECT_LE(most, kSlots);
}

TEST(Slot, MovesItsMemory) {
  Arena arena(kSlot, 2 * kSlot);
  Slot a = arena.acquire();
  Slot b = arena.acquire();
  std::byte* const first = a.data();
  Slot c = std::move(a);
  EXPECT_EQ(c.data(), first);
  EXPECT_EQ(a.data(), nullptr);  // NOLINT: what is left is empty
  b = std::move(c);
  EXPECT_EQ(b.data(), first);
  expect_full(arena, std::move(b));  // nothing was given back twice, or early
}

TEST(SharedArena, IsOneForEachPairOfSizes) {
  Arena& arena = shared_arena(kSlot, 2 * kSlot);
  EXPECT_EQ(&shared_arena(kSlot, 2 * kSlot), &arena);
  EXPECT_NE(&shared_arena(kSlot, 3 * kSlot), &arena);
}

}  // namespace
}  // namespace vescale_ckpt
