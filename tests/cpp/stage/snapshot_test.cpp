#include "stage/snapshot.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <deque>
#include <optional>
#include <thread>

#include "base/error.h"
#include "base/system.h"
#include "error_of.h"
#include "stage/snapshot_rows.h"
#include "tensors.h"

namespace vescale_ckpt::stage {
namespace {

using namespace std::chrono_literals;

constexpr uint64_t kUnlimited = uint64_t{1} << 40;
constexpr unsigned kWorkers = 3;

// A state in host memory.
class State : public SnapshotRows {
 public:
  void add_view(std::string_view dtype, const std::byte* data, const Sizes& sizes, const Sizes& strides) {
    SnapshotRows::add(dtype, reinterpret_cast<uintptr_t>(data), data, sizes, strides);
  }

  // A tensor of its own.
  void add(std::string_view dtype, const Sizes& sizes, uint64_t place = kTorchPlace) {
    const uint64_t bytes = format::tensor_bytes(format::dtypes()[dtype_code(dtype)], sizes);
    add_view(dtype, memory(bytes, place), sizes, row_major(sizes));
  }

  std::byte* memory(uint64_t bytes, uint64_t place = kTorchPlace) {
    constexpr uint64_t kPeriod = 65'537;  // no power of two: what is in the wrong place differs
    const Memory& memory = memory_.emplace_back(bytes, place);
    fill_random(memory.bytes().first(std::min(bytes, kPeriod)), memory_.size());
    for (uint64_t filled = kPeriod; filled < bytes; filled *= 2) {
      std::memcpy(memory.data() + filled, memory.data(), std::min(filled, bytes - filled));
    }
    return memory.data();
  }

  // What a trainer does next.
  void overwrite() {
    for (const Memory& memory : memory_) std::memset(memory.data(), 0xEE, memory.size());
  }

 private:
  std::deque<Memory> memory_;
};

class SnapshotTest : public ::testing::Test {
 protected:
  void TearDown() override {
    system::clear_faults();
    EXPECT_EQ(arena_.memory().in_use, 0u);
  }

  SnapshotArena arena_;
};

State some_of_everything() {
  State state;
  state.add("float32", {});
  state.add("bfloat16", {3, 5});
  state.add("float32", {0, 4});
  state.add("uint8", {4'100'001});  // the next piece of work begins in one of those below
  state.add("complex128", {2, 1, 3}, 16);
  state.add("float64", {60, 70});
  state.add("bool", {1}, 3);
  std::byte* const matrix = state.memory(4 * 350 * 400);
  state.add_view("float32", matrix, {400, 350}, {1, 400});
  state.add_view("float32", matrix, {170, 2}, {800, 7});
  state.add_view("float32", matrix, {3, 1000}, {0, 1});
  state.add_view("float32", matrix + 4, {10, 20}, {20, 1});
  state.add_view("float32", matrix + 44, {10, 20}, {20, 1});
  state.add_view("int32", matrix, {400, 350}, {1, 400});
  state.add("int8", {});
  return state;
}

TEST_F(SnapshotTest, CopiesAnyLengthFromAndToAnyAddress) {
  State state;
  for (const int64_t bytes : {1, 63, 64, 511, 512, 513, 640, 4095, 4096, 4097, 4160, 8191, 70'000, (4 << 20) + 1}) {
    for (const uint64_t from : {0, 1, 24, 64}) state.add("uint8", {bytes}, from);  // the large ones are cut anywhere
  }
  Snapshot snapshot(state.table(), kUnlimited, 1, arena_);
  snapshot.copy(1);
  state.expect_copied(snapshot);
}

TEST_F(SnapshotTest, HoldsWhatTheStateWas) {
  State state = some_of_everything();
  for (const unsigned threads : {1u, 3u, 16u}) {
    Snapshot snapshot(state.table(), kUnlimited, threads, arena_);
    EXPECT_EQ(snapshot.first(), 0u);
    snapshot.copy(threads);
    state.expect_copied(snapshot);
  }
  Snapshot snapshot(state.table(), kUnlimited, kWorkers, arena_);
  snapshot.start(kWorkers);
  snapshot.wait();
  state.overwrite();
  state.expect_copied(snapshot);
}

void expect_invalid(const std::function<void()>& call) {
  EXPECT_EQ(error_of(call).kind, Error::Kind::invalid);
}

TEST_F(SnapshotTest, IsCopiedOnceAndNotReadBefore) {
  State state;
  state.add("uint8", {1000});
  Snapshot snapshot(state.table(), kUnlimited, kWorkers, arena_);
  expect_invalid([&] { snapshot.wait(); });
  expect_invalid([&] { snapshot.table(); });
  snapshot.copy(kWorkers);
  expect_invalid([&] { snapshot.copy(kWorkers); });
  expect_invalid([&] { snapshot.start(kWorkers); });
  state.expect_copied(snapshot);
}

void expect_cancelled_for_good(Snapshot& snapshot) {
  for (int again = 0; again < 2; ++again) {
    EXPECT_EQ(error_of([&] { snapshot.wait(); }).kind, Error::Kind::cancelled);
  }
  expect_invalid([&] { snapshot.table(); });
}

TEST_F(SnapshotTest, EndsWhenItIsCancelled) {
  State state;
  state.add("uint8", {9 << 20});
  {
    Snapshot snapshot(state.table(), kUnlimited, kWorkers, arena_);
    snapshot.cancel();
    snapshot.start(kWorkers);
    expect_cancelled_for_good(snapshot);
  }
  Snapshot whole(state.table(), kUnlimited, kWorkers, arena_);
  whole.copy(kWorkers);
  whole.cancel();  // too late
  state.expect_copied(whole);
}

TEST_F(SnapshotTest, CopiesWithoutTheKernelWhereItMayNotHelp) {
  const State state = some_of_everything();
  for (const int error : {ENOSYS, EPERM, 0}) {  // 0: some of it only
    system::inject_fault(Call::peek, error, 1, 1);
    Snapshot snapshot(state.table(), kUnlimited, kWorkers, arena_);
    snapshot.start(kWorkers);
    snapshot.wait();
    EXPECT_GE(system::calls_seen(Call::peek), 2u);
    state.expect_copied(snapshot);
    system::clear_faults();
  }
}

// With any amount copied; the sanitizers look on.
TEST_F(SnapshotTest, EndsAtAnyMoment) {
  State state;
  state.add("uint8", {20 << 20});
  for (uint64_t round = 0; round < 12; ++round) {
    Snapshot snapshot(state.table(), kUnlimited, kWorkers, arena_);
    snapshot.start(2);
    std::this_thread::sleep_for(round * 300us);
    if (round % 2 == 0) continue;  // destroyed
    std::jthread other([&] { snapshot.cancel(); });
    try {
      snapshot.wait();
      state.expect_copied(snapshot);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind, Error::Kind::cancelled);
    }
  }
}

// A data loader that forks while a save is under way has neither its threads nor its memory, and exits all the same.
TEST_F(SnapshotTest, IsAnEmptyShellAfterFork) {
  State state;
  state.add("uint8", {9 << 20});
  std::optional<Snapshot> snapshot(std::in_place, state.table(), kUnlimited, kWorkers, arena_);
  snapshot->start(2);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    snapshot.reset();
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  snapshot->wait();
  state.expect_copied(*snapshot);
}

}  // namespace
}  // namespace vescale_ckpt::stage
