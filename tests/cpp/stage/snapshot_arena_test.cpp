#include "stage/snapshot_arena.h"

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <csignal>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "scratch.h"

namespace vescale_ckpt::stage {
namespace {

constexpr uint64_t kGranule = SnapshotArena::kGranule;
constexpr uint64_t kAmple = 1 << 30;
constexpr unsigned kHelpers = 2;

bool overlap(const SnapshotRange& a, const SnapshotRange& b) {
  return a.data() < b.data() + b.bytes() && b.data() < a.data() + a.bytes();
}

TEST(SnapshotArena, HandsOutWholeGranulesFromTheStartOfAPiece) {
  SnapshotArena arena;
  const SnapshotRange range = arena.acquire(kGranule + 1, kAmple, kHelpers);
  ASSERT_EQ(range.bytes(), 2 * kGranule);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(range.data()) % kPinPiece, 0u);
  std::memset(range.data(), 1, range.bytes());
  EXPECT_EQ(arena.memory().touched, 2 * kGranule);
  EXPECT_EQ(arena.memory().in_use, 2 * kGranule);
  EXPECT_EQ(arena.memory().registered, 0u);
  EXPECT_EQ(arena.acquire(0, kAmple, kHelpers).bytes(), 0u);
}

TEST(SnapshotArena, GivesLessRatherThanPassTheBudget) {
  SnapshotArena arena;
  const SnapshotRange first = arena.acquire(2 * kGranule, 5 * kGranule + 1, kHelpers);
  EXPECT_EQ(first.bytes(), 2 * kGranule);
  const SnapshotRange second = arena.acquire(kAmple, 5 * kGranule + 1, kHelpers);
  EXPECT_EQ(second.bytes(), 3 * kGranule);
  EXPECT_FALSE(overlap(first, second));
  EXPECT_EQ(arena.acquire(1, 5 * kGranule, kHelpers).bytes(), 0u);
  EXPECT_EQ(arena.acquire(1, kGranule, kHelpers).bytes(), 0u);  // a budget that others passed before
  EXPECT_EQ(arena.acquire(1, 6 * kGranule, kHelpers).bytes(), kGranule);
  SnapshotArena other;
  EXPECT_EQ(other.acquire(kGranule, 0, kHelpers).bytes(), 0u);
  EXPECT_EQ(other.acquire(kGranule, kGranule - 1, kHelpers).bytes(), 0u);
  EXPECT_EQ(other.memory().touched, 0u);
}

TEST(SnapshotArena, KeepsMemoryAndTakesItAgainWithoutTouching) {
  SnapshotArena arena;
  std::byte* before = nullptr;
  {
    const SnapshotRange range = arena.acquire(3 * kGranule, kAmple, kHelpers);
    before = range.data();
    std::memset(range.data(), 7, range.bytes());
  }
  EXPECT_EQ(arena.memory().in_use, 0u);
  EXPECT_EQ(arena.memory().touched, 3 * kGranule);
  const ArmedFault counting(Call::populate, ENOMEM, 1000);
  const SnapshotRange range = arena.acquire(3 * kGranule, kAmple, kHelpers);
  EXPECT_EQ(system::calls_seen(Call::populate), 0u);
  EXPECT_EQ(range.data(), before);
  EXPECT_EQ(range.data()[kGranule], std::byte{7});
}

TEST(SnapshotArena, PutsARangeWhereTheFirstOneThatFitsWas) {
  SnapshotArena arena;
  const SnapshotRange first = arena.acquire(kGranule, kAmple, kHelpers);
  SnapshotRange second = arena.acquire(kGranule, kAmple, kHelpers);
  const SnapshotRange third = arena.acquire(kGranule, kAmple, kHelpers);
  EXPECT_EQ(second.data(), first.data() + kPinPiece);
  EXPECT_EQ(third.data(), second.data() + kPinPiece);
  std::byte* const hole = second.data();
  second = {};
  const SnapshotRange wide = arena.acquire(kPinPiece + kGranule, kAmple, kHelpers);
  EXPECT_EQ(wide.data(), third.data() + kPinPiece);
  EXPECT_EQ(arena.acquire(kGranule, kAmple, kHelpers).data(), hole);
}

// Else memory that was touched once and is in the wrong place would come on top of the budget.
TEST(SnapshotArena, AllMemoryTouchedStaysWithinTheBudget) {
  constexpr uint64_t kBudget = 10 * kGranule;
  SnapshotArena arena;
  SnapshotRange low = arena.acquire(6 * kGranule, kBudget, kHelpers);
  const SnapshotRange high = arena.acquire(2 * kGranule, kBudget, kHelpers);
  low = {};
  const SnapshotRange first = arena.acquire(kGranule, kBudget, kHelpers);
  EXPECT_EQ(arena.memory().touched, 8 * kGranule);
  const SnapshotRange third = arena.acquire(7 * kGranule, kBudget, kHelpers);
  EXPECT_EQ(third.bytes(), 7 * kGranule);
  EXPECT_EQ(arena.memory().in_use, kBudget);
  EXPECT_EQ(arena.memory().touched, kBudget);  // without the five behind `first`
}

TEST(SnapshotArena, GivesBackFreePiecesBeforeItTouchesOthers) {
  SnapshotArena arena;
  {
    const SnapshotRange low = arena.acquire(kGranule, kAmple, kHelpers);
    const SnapshotRange high = arena.acquire(4 * kGranule, kAmple, kHelpers);
  }
  EXPECT_EQ(arena.memory().touched, 5 * kGranule);
  EXPECT_EQ(arena.acquire(5 * kGranule, 8 * kGranule, kHelpers).bytes(), 5 * kGranule);  // all in the first piece
  EXPECT_EQ(arena.memory().touched, 5 * kGranule);
}

TEST(SnapshotArena, TrimGivesBackWhatIsNotInUse) {
  SnapshotArena arena;
  const SnapshotRange kept = arena.acquire(kGranule, kAmple, kHelpers);
  std::memset(kept.data(), 3, kept.bytes());
  {
    const SnapshotRange freed = arena.acquire(2 * kGranule, kAmple, kHelpers);
    std::memset(freed.data(), 4, freed.bytes());
  }
  EXPECT_EQ(arena.memory().touched, 3 * kGranule);
  arena.trim();
  EXPECT_EQ(arena.memory().touched, kGranule);
  EXPECT_EQ(kept.data()[kGranule - 1], std::byte{3});
  const SnapshotRange again = arena.acquire(2 * kGranule, kAmple, kHelpers);
  EXPECT_EQ(again.data()[0], std::byte{0});  // the system's pages, not ours of before
}

TEST(SnapshotArena, PreparesForTheNextRange) {
  SnapshotArena arena;
  EXPECT_EQ(arena.prepare(3 * kGranule, kHelpers), 3 * kGranule);
  EXPECT_EQ(arena.memory().touched, 3 * kGranule);
  EXPECT_EQ(arena.memory().in_use, 0u);
  const ArmedFault counting(Call::populate, ENOMEM, 1000);
  EXPECT_EQ(arena.acquire(3 * kGranule, 3 * kGranule, kHelpers).bytes(), 3 * kGranule);
  EXPECT_EQ(system::calls_seen(Call::populate), 0u);
}

// The policy and the node of the memory at an address; nullopt where a sandbox does not tell.
std::optional<std::pair<int, unsigned long>> policy_at(const void* address) {
  int policy = -1;
  unsigned long nodes[16] = {};
  if (::syscall(SYS_get_mempolicy, &policy, nodes, 8 * sizeof nodes, address, MPOL_F_ADDR) != 0) return std::nullopt;
  return std::pair(policy, nodes[0]);
}

TEST(SnapshotArena, WorksWithPagesOf64KiB) {
  const LargePages pages;
  SnapshotArena arena;
  for (const uint64_t bytes : {kGranule, 3 * kGranule}) {
    const SnapshotRange range = arena.acquire(bytes - 5, kAmple, kHelpers);
    ASSERT_EQ(range.bytes(), bytes);
    std::memset(range.data(), 1, range.bytes());
  }
  EXPECT_EQ(arena.memory().touched, 3 * kGranule);
  arena.trim();
  EXPECT_EQ(arena.memory().touched, 0u);
}

TEST(SnapshotArena, TakesMemoryOnANode) {
  for (const bool before : {false, true}) {  // before it has addresses
    SnapshotArena arena;
    if (before) arena.prefer_node(0);
    const SnapshotRange range = arena.acquire(kGranule, kAmple, kHelpers);
    if (!before) arena.prefer_node(0);
    const auto policy = policy_at(range.data());
    if (!policy) GTEST_SKIP() << "the system does not tell";
    EXPECT_EQ(policy->first, int{MPOL_PREFERRED});
    EXPECT_EQ(policy->second, 1UL);
    EXPECT_EQ(policy_at(range.data() + 8 * kPinPiece), policy);
    arena.prefer_node(std::nullopt);
    EXPECT_EQ(policy_at(range.data())->first, int{MPOL_DEFAULT});
    arena.prefer_node(1 << 20);  // without effect
    EXPECT_EQ(policy_at(range.data())->first, int{MPOL_DEFAULT});
    EXPECT_EQ(arena.acquire(kGranule, kAmple, kHelpers).bytes(), kGranule);
  }
}

// --- The system refuses.

TEST(SnapshotArena, AsksForFewerAddressesWhereThereIsALimit) {
  uint64_t reserved = kAmple;
  for (uint64_t refused = 0; reserved > 3 * kPinPiece; ++refused) {
    SnapshotArena arena;
    const ArmedFault fault(Call::map, ENOMEM, 0, refused);
    SnapshotRange first = arena.acquire(kGranule, kAmple, kHelpers);
    ASSERT_EQ(first.bytes(), kGranule);
    reserved = arena.memory().reserved;
    if (reserved > 3 * kPinPiece || reserved == kPinPiece) continue;
    // No run is long enough: the longest it is.
    const SnapshotRange rest = arena.acquire(kAmple, kAmple, kHelpers);
    EXPECT_EQ(rest.bytes(), reserved - kPinPiece);
    EXPECT_EQ(arena.acquire(1, kAmple, kHelpers).bytes(), 0u);
  }
}

TEST(SnapshotArena, LivesWithoutAddresses) {
  SnapshotArena arena;
  {
    const ArmedFault fault(Call::map, ENOMEM, 0, 1000);
    EXPECT_EQ(arena.acquire(kGranule, kAmple, kHelpers).bytes(), 0u);
    EXPECT_EQ(arena.memory().reserved, 0u);
    arena.trim();
  }
  EXPECT_EQ(arena.acquire(kGranule, kAmple, kHelpers).bytes(), kGranule);
}

TEST(SnapshotArena, GivesWhatThereIsMemoryFor) {
  constexpr uint64_t kPart = 16 << 20;  // what is taken at once
  for (const unsigned threads : {1u, 3u}) {
    SnapshotArena arena;
    {
      const ArmedFault fault(Call::populate, ENOMEM, 2, 1000);
      const SnapshotRange range = arena.acquire(3 * kPart, kAmple, threads);
      EXPECT_LE(range.bytes(), 2 * kPart);
      if (threads == 1) {
        EXPECT_EQ(range.bytes(), 2 * kPart);
      }
      EXPECT_EQ(arena.memory().touched, range.bytes());
      EXPECT_EQ(arena.memory().in_use, range.bytes());
      for (uint64_t at = 0; at < range.bytes(); at += kGranule) range.data()[at] = std::byte{1};
    }
    EXPECT_EQ(arena.acquire(3 * kPart, kAmple, threads).bytes(), 3 * kPart);
    EXPECT_EQ(arena.memory().touched, 3 * kPart);
  }
}

TEST(SnapshotArena, EndsAtThePieceThatMayNotBeWritten) {
  SnapshotArena arena;
  {
    const ArmedFault fault(Call::protect, ENOMEM, 1);
    EXPECT_EQ(arena.acquire(kPinPiece + kGranule, kAmple, kHelpers).bytes(), kPinPiece);
  }
  {
    SnapshotArena other;
    const ArmedFault fault(Call::protect, ENOMEM, 0);
    EXPECT_EQ(other.acquire(kGranule, kAmple, kHelpers).bytes(), 0u);
    EXPECT_EQ(other.memory().touched, 0u);
  }
  EXPECT_EQ(arena.acquire(kPinPiece + kGranule, kAmple, kHelpers).bytes(), kPinPiece + kGranule);
}

TEST(SnapshotArena, WritesToEachPageWhereTheKernelTakesNoneByItself) {
  SnapshotArena arena;
  const ArmedFault fault(Call::populate, EINVAL, 0, 1000);
  const SnapshotRange range = arena.acquire(3 * kGranule, kAmple, kHelpers);
  ASSERT_EQ(range.bytes(), 3 * kGranule);
  EXPECT_GT(system::calls_seen(Call::populate), 0u);
  EXPECT_EQ(arena.memory().touched, 3 * kGranule);
  EXPECT_EQ(range.data()[range.bytes() - 1], std::byte{0});
}

TEST(SnapshotArena, WorksWithoutAdvice) {
  SnapshotArena arena;
  const ArmedFault fault(Call::advise, EINVAL, 0, 1000);
  {
    const SnapshotRange range = arena.acquire(kGranule, kAmple, kHelpers);
  }
  arena.trim();
  EXPECT_EQ(arena.memory().touched, kGranule);  // the system kept it: so it is still counted
  EXPECT_EQ(arena.acquire(kGranule, kAmple, kHelpers).bytes(), kGranule);
}

// --- Registration.

class Device {
 public:
  MemoryRegistrar registrar() {
    return {[this](std::byte* address, uint64_t bytes) {
              const std::lock_guard lock(mutex_);
              ++asked_;
              if (refuses_) return false;
              EXPECT_TRUE(registered_.emplace(address, bytes).second);
              return true;
            },
            [this](std::byte* address, uint64_t bytes) {
              const std::lock_guard lock(mutex_);
              const auto found = registered_.find(address);
              ASSERT_NE(found, registered_.end());
              EXPECT_EQ(found->second, bytes);
              registered_.erase(found);
            }};
  }
  void refuse() { refuses_ = true; }
  unsigned asked() const { return asked_; }
  const std::map<std::byte*, uint64_t>& registered() const { return registered_; }

 private:
  std::mutex mutex_;
  bool refuses_ = false;
  unsigned asked_ = 0;
  std::map<std::byte*, uint64_t> registered_;
};

using Registrations = std::map<std::byte*, uint64_t>;

// Until nothing is left to register.
void settle(SnapshotArena& arena) {
  arena.prepare(0, 1);
}

TEST(SnapshotArena, RegistersPieceByPiece) {
  Device device;
  {
    SnapshotArena arena;
    arena.set_registrar(device.registrar());
    std::byte* data = nullptr;
    {
      const SnapshotRange range = arena.acquire(kGranule, kAmple, kHelpers);
      data = range.data();
      settle(arena);
      EXPECT_EQ(device.registered(), (Registrations{{data, kGranule}}));
    }
    EXPECT_EQ(device.registered().size(), 1u);  // kept from save to save
    {
      const SnapshotRange range = arena.acquire(kPinPiece + kGranule, kAmple, kHelpers);
      settle(arena);
      EXPECT_EQ(device.registered(), (Registrations{{data, kPinPiece}, {data + kPinPiece, kGranule}}));
      EXPECT_EQ(arena.memory().registered, kPinPiece + kGranule);
    }
    const unsigned asked = device.asked();
    const SnapshotRange range = arena.acquire(kPinPiece, kAmple, kHelpers);
    settle(arena);
    EXPECT_EQ(device.asked(), asked);
    arena.trim();
    EXPECT_EQ(device.registered(), (Registrations{{data, kPinPiece}}));
  }
  EXPECT_TRUE(device.registered().empty());
}

TEST(SnapshotArena, RegistersWhatWasTouchedBefore) {
  Device first, second;
  SnapshotArena arena;
  arena.prepare(2 * kGranule, kHelpers);
  arena.set_registrar(first.registrar());
  EXPECT_TRUE(first.registered().empty());
  {
    const SnapshotRange range = arena.acquire(kGranule, kAmple, kHelpers);
  }
  settle(arena);
  EXPECT_EQ(arena.memory().registered, 2 * kGranule);
  arena.set_registrar(second.registrar());
  EXPECT_TRUE(first.registered().empty());
  arena.prepare(kGranule, kHelpers);
  EXPECT_EQ(second.registered().size(), 1u);
  arena.set_registrar({});
  EXPECT_TRUE(second.registered().empty());
}

TEST(SnapshotArena, DoesNotAskAgainForWhatADeviceUsesAsItIs) {
  Device device;
  device.refuse();
  SnapshotArena arena;
  arena.set_registrar(device.registrar());
  EXPECT_EQ(arena.acquire(3 * kGranule, kAmple, kHelpers).bytes(), 3 * kGranule);
  const SnapshotRange used = arena.acquire(kGranule, kAmple, kHelpers);  // of the same piece
  settle(arena);
  EXPECT_EQ(device.asked(), 1u);
  const SnapshotRange other = arena.acquire(3 * kGranule, 4 * kGranule, kHelpers);
  EXPECT_EQ(other.bytes(), 3 * kGranule);
  EXPECT_EQ(arena.memory().touched, 4 * kGranule);  // of the first piece, only what is used
  settle(arena);
  EXPECT_EQ(device.asked(), 2u);  // for the second piece
}

class Gate {
 public:
  void open(unsigned count) {
    const std::lock_guard lock(mutex_);
    open_ += count;
    changed_.notify_all();
  }
  void pass() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return open_ != 0; });
    --open_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  unsigned open_ = 0;
};

TEST(SnapshotArena, RangesBecomeUsablePieceByPiece) {
  constexpr std::chrono::milliseconds kSoon{1}, kLong{600'000};
  SnapshotArena arena;
  {
    const SnapshotRange range = arena.acquire(kGranule, kAmple, kHelpers);
    EXPECT_TRUE(range.wait_until_usable(range.data(), kSoon));  // nobody registers
  }
  Gate gate;
  std::atomic<unsigned> asked{0};
  arena.set_registrar({[&](std::byte*, uint64_t) {
                         gate.pass();
                         return asked++ != 1;  // one is refused
                       },
                       [](std::byte*, uint64_t) {}});
  const SnapshotRange range = arena.acquire(3 * kPinPiece, kAmple, kHelpers);
  for (uint64_t piece = 0; piece < 3; ++piece) {
    const std::byte* const last = range.data() + (piece + 1) * kPinPiece - 1;
    EXPECT_FALSE(range.wait_until_usable(last, kSoon));
    gate.open(1);
    EXPECT_TRUE(range.wait_until_usable(last, kLong));
    EXPECT_TRUE(range.wait_until_usable(range.data(), kSoon));
  }
  EXPECT_EQ(arena.memory().registered, 2 * kPinPiece);
  arena.set_registrar({});
  EXPECT_TRUE(range.wait_until_usable(range.data(), kSoon));
}

std::atomic<bool> registration_began, began_while_touching;

// Interrupts the touching of memory until a registration begins.
void wait_for_registration(int) {
  for (int tenth = 0; tenth < 600 && !registration_began; ++tenth) ::usleep(100'000);
  began_while_touching = registration_began.load();
}

TEST(SnapshotArena, RegistersWhatIsTouchedWhileItTouchesTheRest) {
  constexpr uint64_t kWanted = 5 * kPinPiece, kPart = 16 << 20, kFirstStep = 4 * kPinPiece;
  registration_began = began_while_touching = false;
  struct sigaction wait{}, before{};
  wait.sa_handler = wait_for_registration;
  ASSERT_EQ(::sigaction(SIGUSR1, &wait, &before), 0);
  const ArmedFault interruption(Call::populate, -SIGUSR1, kFirstStep / kPart);
  SnapshotArena arena;
  arena.set_registrar({[](std::byte*, uint64_t) { return registration_began = true; }, [](std::byte*, uint64_t) {}});
  EXPECT_EQ(arena.prepare(kWanted, 1), kWanted);
  EXPECT_EQ(arena.memory().registered, kWanted);
  EXPECT_EQ(system::calls_seen(Call::populate), kWanted / kPart);
  EXPECT_TRUE(began_while_touching);
  ::sigaction(SIGUSR1, &before, nullptr);
}

TEST(SnapshotArena, RegistersOnlyWhatThereIsMemoryFor) {
  constexpr uint64_t kPart = 16 << 20, kHad = 17 * kPart;
  Device device;
  SnapshotArena arena;
  arena.set_registrar(device.registrar());
  std::byte* data = nullptr;
  {
    const ArmedFault fault(Call::populate, ENOMEM, kHad / kPart, 1000);
    const SnapshotRange range = arena.acquire(6 * kPinPiece, kAmple, 1);
    data = range.data();
    EXPECT_EQ(range.bytes(), kHad);
    EXPECT_EQ(arena.memory().touched, kHad);
    settle(arena);
  }
  EXPECT_EQ(device.registered(), (Registrations{{data, kPinPiece},
                                                {data + kPinPiece, kPinPiece},
                                                {data + 2 * kPinPiece, kPinPiece},
                                                {data + 3 * kPinPiece, kPinPiece},
                                                {data + 4 * kPinPiece, kPart}}));
  EXPECT_EQ(arena.acquire(6 * kPinPiece, kAmple, kHelpers).bytes(), 6 * kPinPiece);
  settle(arena);
  EXPECT_EQ(arena.memory().registered, 6 * kPinPiece);
}

// --- Threads and processes.

TEST(SnapshotArena, SharesAmongThreads) {
  constexpr unsigned kWorkers = 4;
  constexpr uint64_t kBudget = 3 * kGranule;
  SnapshotArena arena;
  {
    std::vector<std::jthread> threads;
    for (unsigned worker = 0; worker < kWorkers; ++worker) {
      threads.emplace_back([&, worker] {
        for (int round = 0; round < 50; ++round) {
          const SnapshotRange range = arena.acquire((1 + worker % 2) * kGranule, kBudget, kHelpers);
          for (uint64_t at = 0; at < range.bytes(); at += kGranule) range.data()[at] = std::byte(worker);
          EXPECT_LE(arena.memory().in_use, kBudget);
          for (uint64_t at = 0; at < range.bytes(); at += kGranule) EXPECT_EQ(range.data()[at], std::byte(worker));
          if (round % 10 == 0) arena.trim();
        }
      });
    }
  }
  EXPECT_EQ(arena.memory().in_use, 0u);
}

TEST(SnapshotArena, OfTheProcessIsNewAfterFork) {
  const SnapshotRange taken = snapshot_arena().acquire(kGranule, kAmple, 1);
  ASSERT_EQ(taken.bytes(), kGranule);
  taken.data()[0] = std::byte{1};
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const bool empty = snapshot_arena().memory().touched == 0;
    const SnapshotRange own = snapshot_arena().acquire(kGranule, kGranule, 1);
    if (own.bytes() == kGranule) own.data()[0] = std::byte{2};
    ::_exit(empty && own.bytes() == kGranule ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  EXPECT_EQ(taken.data()[0], std::byte{1});
  EXPECT_EQ(&snapshot_arena(), &snapshot_arena());
}

}  // namespace
}  // namespace vescale_ckpt::stage
