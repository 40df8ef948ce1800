// Snapshots of rows that lie on accelerators, beside rows in host memory: over the fake device.
#include <cstring>
#include <deque>
#include <future>
#include <memory>
#include <thread>

#include "base/error.h"
#include "device/cuda.h"
#include "error_of.h"
#include "fakes/fake_runtime.h"
#include "stage/snapshot_rows.h"
#include "tensors.h"

namespace vescale_ckpt::stage {
namespace {

constexpr uint64_t kPlenty = uint64_t{1} << 40;
constexpr unsigned kThreads = 2;

class DeviceSnapshot : public ::testing::Test {
 protected:
  // Rows on devices or (-1) in host memory.
  void add_view(int device, std::string_view dtype, uint64_t address, const Sizes& sizes, const Sizes& strides) {
    const std::byte* memory = device < 0 ? reinterpret_cast<std::byte*>(address) : runtime_.memory(address);
    rows_.add(dtype, address, memory, sizes, strides);
    of_rows_.push_back(device);
  }

  void add(int device, std::string_view dtype, const Sizes& sizes) {
    const uint64_t bytes = format::tensor_bytes(format::dtypes()[dtype_code(dtype)], sizes);
    add_view(device, dtype, memory(device, bytes), sizes, row_major(sizes));
  }

  uint64_t memory(int device, uint64_t bytes) {
    const uint64_t seed = ++allocations_;
    if (device < 0) {
      host_.emplace_back(bytes, kTorchPlace);
      fill_random(host_.back().bytes(), seed);
      return reinterpret_cast<uintptr_t>(host_.back().data());
    }
    const device::DeviceAddress address = runtime_.allocate(device, bytes + 1);
    fill_random({runtime_.memory(address), bytes}, seed);
    on_devices_.emplace_back(address, bytes);
    return address;
  }

  // What training does next.
  void overwrite() {
    for (const Memory& memory : host_) std::memset(memory.data(), 0xEE, memory.size());
    for (const auto& [address, bytes] : on_devices_) std::memset(runtime_.memory(address), 0xEE, bytes);
  }

  void add_some_of_everything(int64_t scale = 10) {
    add(0, "float32", {});
    add(-1, "bfloat16", {3, 5});
    for (int64_t size = 0; size < 300; ++size) add(static_cast<int>(size % 2), "uint8", {size});
    add(1, "float32", {70 * scale, 1001});
    add(-1, "float32", {70 * scale, 1001});
    add(0, "uint8", {300'000 * scale + 1});
    const uint64_t matrix = memory(0, 4 * 350 * 400);
    add_view(0, "float32", matrix, {400, 350}, {1, 400});
    add_view(0, "float32", matrix, {400, 350}, {1, 400});
    add_view(0, "float32", matrix, {3, 1000}, {0, 1});
    add_view(0, "float32", matrix + 4, {1000}, {1});
    add_view(0, "float32", matrix + 400, {1000}, {1});
    add(1, "complex128", {2, 1, 3});
    add(-1, "int8", {});
  }

  SnapshotDevices devices(std::vector<Producer> producers = {{0, 0}, {1, 0}}) {
    return {of_rows_, std::move(producers), &pipelines_};
  }
  std::unique_ptr<Snapshot> make(uint64_t budget_bytes = kPlenty) {
    return std::make_unique<Snapshot>(rows_.table(), budget_bytes, kThreads, arena_, devices());
  }

  void expect_copied(const Snapshot& snapshot) const { rows_.expect_copied(snapshot); }

  // Rows for three pieces of the arena, small ones among them.
  void add_three_pieces() {
    const uint64_t matrix = memory(1, 30 << 20);
    for (int i = 0; i < 5; ++i) {
      const auto half = static_cast<int64_t>(15 << 20);
      add_view(1, "uint8", matrix + static_cast<uint64_t>(i), {2, half - 8}, {half, 1});
      for (int small = 0; small < 10; ++small) add(0, "uint8", {100 + small});
    }
  }

  // Lets the arena lock its memory as ever, but calls `before` ahead of each lock, with the number of those before it.
  void lock_memory(std::function<void(uint64_t)> before) {
    MemoryRegistrar registrar = page_locking(runtime_.accelerator(0));
    const auto locks = std::make_shared<std::atomic<uint64_t>>(0);
    arena_.set_registrar({[add = registrar.add, before = std::move(before), locks](std::byte* address, uint64_t bytes) {
                            before((*locks)++);
                            return add(address, bytes);
                          },
                          registrar.remove});
  }

  void TearDown() override {
    EXPECT_EQ(arena_.memory().in_use, 0u);
    EXPECT_EQ(runtime_.count("locks under copies"), 0u);
  }

  device::FakeRuntime runtime_;
  SnapshotArena arena_;
  DevicePipelines pipelines_{runtime_, {.slab_bytes = 64 << 10, .group_bytes = 256 << 10}};
  std::deque<Memory> host_;
  std::vector<std::pair<device::DeviceAddress, uint64_t>> on_devices_;
  uint64_t allocations_ = 0;
  SnapshotRows rows_;
  std::vector<int64_t> of_rows_;
};

TEST_F(DeviceSnapshot, HoldsWhatTheStateWasWhereverItIs) {
  add_some_of_everything();
  for (const bool page_locked : {false, true}) {
    if (page_locked) {
      arena_.set_registrar(page_locking(runtime_.accelerator(0)));
      arena_.prepare(1, kThreads);
      EXPECT_GT(arena_.memory().registered, 0u);
    }
    const auto snapshot = make();
    EXPECT_EQ(snapshot->first(), 0u);
    snapshot->copy(kThreads);
    expect_copied(*snapshot);
  }
  const auto snapshot = make();
  snapshot->start(kThreads);
  snapshot->wait();
  overwrite();
  expect_copied(*snapshot);
}

TEST_F(DeviceSnapshot, SnapshotsTakeTurnsOnADevice) {
  add(0, "uint8", {100'000});
  device::FakeQueue& queue = runtime_.producer(0, 0);
  queue.hold();
  queue.push([] {});
  const auto first = make(), second = make();
  first->start(kThreads);
  second->start(kThreads);  // returns although the pipeline is not free
  queue.release();
  second->wait();
  first->wait();
  expect_copied(*first);
  expect_copied(*second);
}

void expect_cancelled(Snapshot& snapshot) {
  EXPECT_EQ(error_of([&] { snapshot.wait(); }).kind, Error::Kind::cancelled);
}

TEST_F(DeviceSnapshot, EndsWhenItIsCancelled) {
  add(0, "uint8", {20 << 20});
  {
    const auto snapshot = make();
    snapshot->cancel();
    snapshot->start(kThreads);
    expect_cancelled(*snapshot);
  }
  for (uint64_t round = 0; round < 8; ++round) {  // with any amount copied; the sanitizers look on
    const auto snapshot = make();
    const uint64_t before = runtime_.count("copies to host");
    snapshot->start(kThreads);
    while (runtime_.count("copies to host") < before + 10 * round) std::this_thread::yield();  // of 80
    if (round % 2 == 0) continue;                                                              // destroyed
    snapshot->cancel();
    try {
      snapshot->wait();
      expect_copied(*snapshot);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind, Error::Kind::cancelled) << error.what();
    }
  }
  const auto whole = make();
  whole->copy(kThreads);
  whole->cancel();  // too late
  expect_copied(*whole);
}

TEST_F(DeviceSnapshot, EndsInTheMiddleOfLocking) {
  add_three_pieces();
  for (const bool destroyed : {false, true}) {
    std::promise<void> go_on;
    const std::shared_future<void> gone_on = go_on.get_future().share();
    lock_memory([&](uint64_t locks) {
      if (locks == 1) gone_on.wait();
    });
    const uint64_t before = runtime_.count("copies to host");
    auto snapshot = make();
    snapshot->start(kThreads);
    while (runtime_.count("copies to host") == before) std::this_thread::yield();
    if (!destroyed) {
      snapshot->cancel();
      expect_cancelled(*snapshot);
    }
    snapshot.reset();
    EXPECT_EQ(runtime_.count("copies in flight"), 0u);
    EXPECT_EQ(arena_.memory().in_use, 0u);
    std::jthread trimming([&] { arena_.trim(); });  // waits for the lock under way
    go_on.set_value();
    trimming.join();
    EXPECT_EQ(arena_.memory().touched, 0u);
    const auto whole = make();
    whole->copy(kThreads);
    expect_copied(*whole);
  }
  EXPECT_EQ(runtime_.count("copies of memory that is not locked"), 0u);
}

}  // namespace
}  // namespace vescale_ckpt::stage
