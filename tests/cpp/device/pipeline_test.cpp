#include "device/pipeline.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/memory.h"
#include "error_of.h"
#include "fakes/fake_runtime.h"

namespace vescale_ckpt::device {
namespace {

using namespace std::chrono_literals;

constexpr auto kLong = 10min;  // a test that needs it has failed

// Rows of all kinds on a device, their place on the host, and what a slow and simple copy would have to give.
class Rows {
 public:
  struct Shape {
    uint32_t item_bytes;
    std::vector<int64_t> sizes, strides;
    uint64_t before;  // bytes in the allocation in front of the first element
    uint64_t extent;  // bytes of the allocation
  };

  Rows(FakeRuntime& runtime, int device, const std::vector<Shape>& shapes, uint64_t alignment, unsigned seed)
      : runtime_(runtime), random_(seed) {
    uint64_t at = 0;
    for (const Shape& shape : shapes) {
      places_.push_back(at);
      uint64_t bytes = shape.item_bytes;
      for (const int64_t size : shape.sizes) bytes *= static_cast<uint64_t>(size);
      at = align_up(at + bytes, alignment);
    }
    host_.resize(at + kBlock);
    base_ = host_.data() + (kBlock - reinterpret_cast<uintptr_t>(host_.data()) % kBlock);
    for (size_t i = 0; i < shapes.size(); ++i) {
      const DeviceAddress allocation = runtime.allocate(device, shapes[i].extent);
      allocations_.push_back(allocation);
      rows_.emplace_back(allocation + shapes[i].before, base_ + places_[i], shapes[i].item_bytes, shapes[i].sizes,
                         shapes[i].strides);
      elements_.push_back(elements_of(shapes[i]));
    }
    shapes_ = shapes;
    at_ = at;
    fill();
  }

  std::vector<DeviceRow> rows() const { return rows_; }
  std::byte* base() const { return base_; }
  uint64_t bytes() const { return at_; }
  DeviceAddress allocation(size_t i) const { return allocations_[i]; }
  const std::vector<Shape>& shapes() const { return shapes_; }

  void fill() {
    fill_randomly(host_.data(), host_.size());
    for (size_t i = 0; i < allocations_.size(); ++i) {
      fill_randomly(runtime_.memory(allocations_[i]), shapes_[i].extent);
    }
    before_.clear();
    for (size_t i = 0; i < allocations_.size(); ++i) {
      const std::byte* data = runtime_.memory(allocations_[i]);
      before_.emplace_back(data, data + shapes_[i].extent);
    }
  }

  // Every element is equal on both sides, and on the device nothing has changed.
  void expect_copied() const {
    for (size_t i = 0; i < shapes_.size(); ++i) {
      const std::byte* device = runtime_.memory(allocations_[i]);
      const std::byte* dense = base_ + places_[i];
      for (const uint64_t place : elements_[i]) {
        ASSERT_EQ(std::memcmp(dense, device + place, shapes_[i].item_bytes), 0) << "row " << i << " at " << place;
        dense += shapes_[i].item_bytes;
      }
      ASSERT_EQ(std::memcmp(before_[i].data(), device, before_[i].size()), 0) << "row " << i << ", around its elements";
    }
  }

 private:
  void fill_randomly(std::byte* data, uint64_t bytes) {
    for (uint64_t at = 0; at < bytes; at += sizeof(uint32_t)) {
      const auto word = static_cast<uint32_t>(random_());
      std::memcpy(data + at, &word, std::min<uint64_t>(sizeof(word), bytes - at));
    }
  }

  static std::vector<uint64_t> elements_of(const Shape& shape) {
    std::vector<uint64_t> places = {shape.before};
    for (size_t dim = 0; dim < shape.sizes.size(); ++dim) {
      std::vector<uint64_t> next;
      for (const uint64_t place : places) {
        for (int64_t i = 0; i < shape.sizes[dim]; ++i) {
          next.push_back(place + static_cast<uint64_t>(i * shape.strides[dim] * shape.item_bytes));
        }
      }
      places = std::move(next);
    }
    return places;
  }

  FakeRuntime& runtime_;
  std::mt19937 random_;
  std::vector<Shape> shapes_;
  std::vector<uint64_t> places_;
  std::vector<std::byte> host_;
  std::byte* base_ = nullptr;
  uint64_t at_ = 0;
  std::vector<DeviceAddress> allocations_;
  std::vector<DeviceRow> rows_;
  std::vector<std::vector<uint64_t>> elements_;
  std::vector<std::vector<std::byte>> before_;
};

Rows::Shape contiguous(uint64_t bytes, uint64_t before = 0) {
  return {static_cast<uint32_t>(bytes), {}, {}, before, before + bytes + 3};  // one element, however large
}

// A permuted view of a slice of a larger tensor, as frameworks make them.
Rows::Shape random_shape(std::mt19937& random) {
  const auto upto = [&](int64_t limit) { return static_cast<int64_t>(random() % static_cast<uint64_t>(limit)); };
  Rows::Shape shape;
  shape.item_bytes = 1u << upto(5);
  const int64_t dims = upto(5);
  std::vector<int64_t> full;
  int64_t stride = 1;
  uint64_t extent = shape.item_bytes;
  for (int64_t dim = 0; dim < dims; ++dim) {
    const int64_t size = upto(20) == 0 ? 0 : 1 + upto(dim == 0 ? 40 : 9);
    const int64_t room = size + (upto(2) == 0 ? upto(3) : 0);
    shape.sizes.insert(shape.sizes.begin(), size);
    shape.strides.insert(shape.strides.begin(), stride);
    if (size != 0) extent += static_cast<uint64_t>((size - 1) * stride) * shape.item_bytes;
    stride *= std::max<int64_t>(room, 1);
  }
  if (upto(2) == 0) {  // permuted
    for (size_t dim = shape.sizes.size(); dim > 1; --dim) {
      const auto other = static_cast<size_t>(upto(static_cast<int64_t>(dim)));
      std::swap(shape.sizes[dim - 1], shape.sizes[other]);
      std::swap(shape.strides[dim - 1], shape.strides[other]);
    }
  }
  shape.before = static_cast<uint64_t>(upto(4)) * shape.item_bytes;
  shape.extent = shape.before + extent + static_cast<uint64_t>(upto(4));
  return shape;
}

std::vector<Rows::Shape> all_kinds(unsigned seed, size_t count) {
  std::mt19937 random(seed);
  std::vector<Rows::Shape> shapes;
  for (size_t i = 0; i < count; ++i) {
    shapes.push_back(i % 3 == 0 ? contiguous(1 + random() % 3000, random() % 20) : random_shape(random));
  }
  shapes.push_back(contiguous(200'000));
  shapes.push_back({100, {60, 60}, {62, 1}, 0, 60 * 6200});  // long runs
  return shapes;
}

bool copy_all(Pipeline& pipeline, const Rows& rows, const HostLayout& layout = {}) {
  const StreamHandle producer = 0;
  pipeline.start(rows.rows(), {&producer, 1}, layout);
  return pipeline.wait(kLong);
}

struct Way {
  bool kernels;
  uint64_t slab_bytes;
  uint64_t alignment;
};

class PipelineWays : public ::testing::TestWithParam<Way> {};

TEST_P(PipelineWays, CopiesEveryByteOfRowsOfAllKinds) {
  const Way way = GetParam();
  FakeRuntime runtime(way.kernels);
  Accelerator& accelerator = runtime.accelerator(0);
  const CopyLimits limits{.slab_bytes = way.slab_bytes, .small_bytes = 2000, .group_bytes = 50'000, .group_copies = 40};
  Pipeline pipeline(accelerator, limits);
  for (unsigned seed = 0; seed < 3; ++seed) {
    Rows rows(runtime, 0, all_kinds(seed, 120), way.alignment, seed);
    constexpr uint64_t kPiece = 5 * kBlock;
    const uint64_t locked = align_down(rows.bytes(), kPiece);
    for (uint64_t at = 0; at < locked; at += kPiece) accelerator.page_lock({rows.base() + at, kPiece});
    const HostLayout layout{reinterpret_cast<uintptr_t>(rows.base()), kPiece, way.alignment};
    ASSERT_TRUE(copy_all(pipeline, rows, layout));
    rows.expect_copied();
    EXPECT_EQ(runtime.count("cuLaunchKernel") != 0, way.kernels && way.slab_bytes != 0);
    for (uint64_t at = 0; at < locked; at += kPiece) accelerator.page_unlock(rows.base() + at);
  }
}

INSTANTIATE_TEST_SUITE_P(, PipelineWays,
                         ::testing::Values(Way{true, 4096, 64}, Way{true, 1 << 20, 1}, Way{true, 0, 64},
                                           Way{false, 4096, 8}));

// Many slabs, one after the other: a slab that is packed again too early holds the wrong bytes.
TEST(Pipeline, SlabsAreUsedAgain) {
  FakeRuntime runtime;
  Pipeline pipeline(runtime.accelerator(0), {.slab_bytes = 1024});
  Rows rows(runtime, 0, std::vector<Rows::Shape>(600, contiguous(100)), 1, 1);
  const uint64_t objects = runtime.count("objects");
  ASSERT_TRUE(copy_all(pipeline, rows));
  rows.expect_copied();
  EXPECT_GE(runtime.count("cuLaunchKernel"), 58u);
  EXPECT_EQ(runtime.count("objects"), objects + 3);  // the slabs; no event for each group
  ASSERT_TRUE(copy_all(pipeline, rows));
  EXPECT_EQ(runtime.count("objects"), objects + 3);
}

TEST(Pipeline, CopiesWhatTheProducersHadQueued) {
  FakeRuntime runtime;
  const StreamHandle first = runtime.make_producer(), second = runtime.make_producer();
  Pipeline pipeline(runtime.accelerator(0), {.slab_bytes = 4096});
  Rows rows(runtime, 0, {contiguous(100), contiguous(200), contiguous(300'000)}, 1, 1);
  for (int round = 0; round < 3; ++round) {
    rows.fill();
    // The packed rows come from one producer, the large one from another; both are late.
    const auto write = [&](size_t row) {
      std::byte* data = runtime.memory(rows.allocation(row));
      std::fill(data, data + rows.shapes()[row].extent, static_cast<std::byte>(40 + round));
    };
    for (const StreamHandle producer : {first, second}) runtime.producer(0, producer).hold();
    runtime.producer(0, first).push([&] { write(0), write(1); });
    runtime.producer(0, second).push([&] { write(2); });
    const std::vector<StreamHandle> producers = {first, second};
    pipeline.start(rows.rows(), producers);
    runtime.producer(0, first).release();
    runtime.producer(0, first).drain();
    EXPECT_FALSE(pipeline.wait(1ms));
    runtime.producer(0, second).release();
    ASSERT_TRUE(pipeline.wait(kLong));
    for (uint64_t i = 0; i < 300'300; ++i) ASSERT_EQ(rows.base()[i], static_cast<std::byte>(40 + round)) << i;
  }
}

// Every call of every kind fails once; each time the error says so, nothing goes on, and the next transfer is whole.
TEST(Pipeline, EveryCallMayFail) {
  const char* const calls[] = {"cudaStreamCreateWithPriority",
                               "cudaEventCreateWithFlags",
                               "captured",
                               "cudaEventRecord",
                               "cudaStreamWaitEvent",
                               "cudaMemcpyAsync",
                               "cudaMemcpy2DAsync",
                               "cudaMemsetAsync",
                               "cuLaunchKernel",
                               "cudaEventSynchronize",
                               "cuCtxPushCurrent_v2",
                               "on the device"};
  for (const std::string call : calls) {
    uint64_t failures = 0;
    for (uint64_t skip = 0;; skip += 1 + skip) {
      FakeRuntime runtime;
      std::vector<Rows::Shape> shapes(20, contiguous(60));
      shapes.push_back(contiguous(70'000));
      shapes.push_back({1000, {12, 5}, {6, 1}, 0, 12 * 6000});
      Rows rows(runtime, 0, shapes, 1, 1);
      runtime.fail(call, skip);
      std::string text;
      std::unique_ptr<Pipeline> pipeline;
      const CopyLimits limits{.slab_bytes = 256, .small_bytes = 2000, .pitched_run = 500, .group_bytes = 30'000};
      try {
        pipeline = std::make_unique<Pipeline>(runtime.accelerator(0), limits);
        copy_all(*pipeline, rows);
      } catch (const Error& error) {
        EXPECT_EQ(error.kind, Error::Kind::device);
        text = error.what();
      }
      if (!runtime.fault_happened()) break;
      ++failures;
      EXPECT_NE(text.find(call == "on the device" ? "the fake device failed, cudaErrorFakeDevice, perhaps"
                                                  : "a fake refusal, cudaErrorFakeCall (7)"),
                std::string::npos)
          << call << " " << skip << ": " << text;
      EXPECT_EQ(runtime.count("copies in flight"), 0u) << call << " " << skip;
      runtime.heal();
      if (!pipeline) pipeline = std::make_unique<Pipeline>(runtime.accelerator(0), limits);
      rows.fill();
      ASSERT_TRUE(copy_all(*pipeline, rows));
      rows.expect_copied();
    }
    EXPECT_NE(failures, 0u) << call;
  }
}

TEST(Pipeline, AFailureWhileEndingAfterAFailureIsNotTheOneReported) {
  FakeRuntime runtime;
  Pipeline pipeline(runtime.accelerator(0), {.slab_bytes = 1024});
  Rows rows(runtime, 0, std::vector<Rows::Shape>(100, contiguous(100)), 1, 1);
  runtime.fail("cuLaunchKernel", 3);
  runtime.fail("cudaStreamSynchronize");
  EXPECT_STREQ(error_of([&] { copy_all(pipeline, rows); }).what(),
               "launch the pack kernel on device 0: CUDA: a fake refusal, cudaErrorFakeCall (7)");
  EXPECT_EQ(runtime.count("copies in flight"), 0u);
  EXPECT_EQ(runtime.count("cudaStreamSynchronize"), 2u);
}

TEST(Pipeline, ASlabThatCannotBeHadLeavesNothing) {
  FakeRuntime runtime;
  const uint64_t objects = runtime.count("objects");
  for (const char* const call : {"cudaMalloc", "cudaHostAlloc"}) {
    runtime.fail(call, 0, cuda::kOutOfMemory);
    EXPECT_EQ(runtime.accelerator(0).make_slab(4096), nullptr);
    runtime.fail(call);
    EXPECT_THROW(runtime.accelerator(0).make_slab(4096), Error);
    EXPECT_EQ(runtime.count("objects"), objects) << call;
  }
}

TEST(Pipeline, WhoLeavesWaitsForWhatIsInFlight) {
  FakeRuntime runtime;
  const uint64_t objects = runtime.count("objects");
  const StreamHandle producer = runtime.make_producer();
  Rows rows(runtime, 0, std::vector<Rows::Shape>(100, contiguous(1000)), 1, 1);
  std::atomic<bool> released{false};
  {
    Pipeline pipeline(runtime.accelerator(0), {.slab_bytes = 1024});
    runtime.producer(0, producer).hold();
    pipeline.start(rows.rows(), {&producer, 1});
    // The stop is asked for before the producer goes on: the destructor has to wait for it.
    runtime.producer(0, producer).push([&] { released = true; });
    std::jthread later([&] { runtime.producer(0, producer).release(); });
  }
  runtime.producer(0, producer).drain();
  EXPECT_TRUE(released);
  EXPECT_EQ(runtime.count("copies in flight"), 0u);
  EXPECT_EQ(runtime.count("objects"), objects);
}

constexpr uint64_t kPiece = 4 * kBlock;

HostLayout usable_up_to(const Rows& rows, const std::atomic<const std::byte*>& end) {
  return {.base = reinterpret_cast<uintptr_t>(rows.base()),
          .piece_bytes = kPiece,
          .wait_until_usable = [&end](const std::byte* at, std::chrono::milliseconds timeout) {
            if (at < end) return true;
            std::this_thread::sleep_for(timeout);
            return at < end;
          }};
}

TEST(Pipeline, CopiesToAPieceWhenItIsUsable) {
  FakeRuntime runtime;
  const StreamHandle producer = 0;
  Rows rows(runtime, 0, std::vector<Rows::Shape>(8, contiguous(kPiece)), 1, 1);
  const std::vector<std::byte> before(rows.base(), rows.base() + rows.bytes());
  std::atomic<const std::byte*> end = rows.base() + 3 * kPiece;
  Pipeline pipeline(runtime.accelerator(0), {.slab_bytes = 0, .group_bytes = kPiece});
  pipeline.start(rows.rows(), {&producer, 1}, usable_up_to(rows, end));
  while (runtime.count("copies to host") < 3) std::this_thread::yield();
  EXPECT_FALSE(pipeline.wait(30ms));
  EXPECT_EQ(runtime.count("copies to host"), 3u);
  EXPECT_TRUE(std::equal(before.begin() + 3 * kPiece, before.end(), rows.base() + 3 * kPiece));
  end = rows.base() + rows.bytes();
  ASSERT_TRUE(pipeline.wait(kLong));
  rows.expect_copied();
}

TEST(Pipeline, MemoryThatNeverBecomesUsableHoldsUpNobodyWhoLeaves) {
  FakeRuntime runtime;
  const StreamHandle producer = 0;
  Rows rows(runtime, 0, std::vector<Rows::Shape>(3, contiguous(kPiece)), 1, 1);
  const std::atomic<const std::byte*> end = rows.base() + kPiece;
  for (const bool cancelled : {false, true}) {
    std::atomic<bool> stop = false;
    Pipeline pipeline(runtime.accelerator(0), {.slab_bytes = 0, .group_bytes = kPiece});
    pipeline.start(rows.rows(), {&producer, 1}, usable_up_to(rows, end), &stop);
    if (!cancelled) continue;
    EXPECT_FALSE(pipeline.wait(1ms));
    stop = true;
    EXPECT_EQ(error_of([&] { pipeline.wait(kLong); }).kind, Error::Kind::cancelled);
  }
  EXPECT_EQ(runtime.count("copies in flight"), 0u);
}

TEST(Pipeline, OneTransferAtATime) {
  FakeRuntime runtime;
  const StreamHandle producer = runtime.make_producer();
  Rows rows(runtime, 0, {contiguous(10)}, 1, 1);
  Pipeline pipeline(runtime.accelerator(0));
  runtime.producer(0, producer).hold();
  pipeline.start(rows.rows(), {&producer, 1});
  EXPECT_THROW(pipeline.start(rows.rows(), {&producer, 1}), Error);
  runtime.producer(0, producer).release();
  EXPECT_TRUE(pipeline.wait(kLong));
  EXPECT_TRUE(pipeline.wait(0ms));  // still true
  pipeline.start({}, {});
  EXPECT_TRUE(pipeline.wait(kLong));
}

}  // namespace
}  // namespace vescale_ckpt::device
