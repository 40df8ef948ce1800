// Copies of loads to accelerators that are threads (device/fake_device.h).
#include "stage/device_load.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <vector>

#include "base/error.h"
#include "device/fake_device.h"

namespace vescale_ckpt::stage {
namespace {

using device::Fault;

constexpr uint64_t kSlot = 1 << 20;

std::byte* pointer_to(device::DeviceAddress address) {
  return reinterpret_cast<std::byte*>(static_cast<uintptr_t>(address));
}

struct Machine {
  device::FakeRuntime runtime{2};
  LoadStreams streams{runtime};
  Arena slots{kSlot, 4 * kSlot};
  std::vector<Producer> producers = {{0, runtime.make_producer()}, {1, runtime.make_producer()}};

  static std::byte value(uint64_t i) { return static_cast<std::byte>(i * 31 + i / 253); }

  // Reads "files" of `bytes` bytes through slots, to `target`, in runs of `run` bytes of which every other is wanted.
  void load(DeviceLoad& load, int device, device::DeviceAddress target, uint64_t bytes, int64_t run) {
    const auto rows = static_cast<int64_t>(bytes) / (2 * run);
    const std::vector<int64_t> sizes = {rows, 2 * run}, none = {0, 0}, box = {rows, run}, strides = {run, 1};
    const read::ReadItem item{.file = 0,
                              .record_offset = 0,
                              .record_length = bytes,
                              .dtype = 0,
                              .chunk_sizes = sizes,
                              .box = io::Box(1, sizes, none, box, strides),
                              .memory = pointer_to(target),
                              .device = device};
    for (uint64_t from = 0; from < bytes; from += kSlot) {
      const uint64_t to = std::min(bytes, from + kSlot);
      Slot slot = slots.acquire();
      load.prepare({slot.data(), kSlot});
      for (uint64_t i = from; i < to; ++i) slot.data()[i - from] = value(i);
      const auto batch = load.begin();
      batch->add(item, slot.data(), from, to);
      batch->send(std::move(slot));
    }
  }

  bool arrived(device::DeviceAddress target, uint64_t bytes, uint64_t run) {
    const std::byte* memory = runtime.memory(target, bytes / 2);
    for (uint64_t i = 0; i < bytes / 2; ++i) {
      if (memory[i] != value(i / run * 2 * run + i % run)) return false;
    }
    return true;
  }
};

TEST(DeviceLoad, CopiesWhatIsReadWhileMoreIsRead) {
  Machine machine;
  constexpr uint64_t kBytes = 12 * kSlot;
  for (const int64_t run : {int64_t{64}, int64_t{1000}, int64_t{64} << 10}) {
    const uint64_t bytes = kBytes / (2 * run) * (2 * run);
    const auto first = machine.runtime.allocate(0, kBytes), second = machine.runtime.allocate(1, kBytes);
    DeviceLoad load(machine.streams, machine.producers);
    machine.load(load, 0, first, bytes, run);
    machine.load(load, 1, second, bytes, run);
    load.finish();
    EXPECT_EQ(machine.runtime.copies_in_flight(), 0u);
    EXPECT_TRUE(machine.arrived(first, bytes, run) && machine.arrived(second, bytes, run)) << run;
  }
  EXPECT_LE(machine.runtime.calls(Fault::page_lock), 4u + 16u) << "each slot is locked once";
  EXPECT_EQ(machine.runtime.calls(Fault::make_stream), 2u) << "streams are kept";
}

TEST(DeviceLoad, ComesAfterTheProducers) {
  Machine machine;
  const auto target = machine.runtime.allocate(0, kSlot);
  device::FakeQueue& producer = machine.runtime.producer(0, machine.producers[0].stream);
  std::byte* memory = machine.runtime.memory(target, kSlot);
  producer.hold();
  producer.push([&] { std::memset(memory, 7, kSlot); });
  DeviceLoad load(machine.streams, machine.producers);
  machine.load(load, 0, target, kSlot, 8 << 10);
  EXPECT_GT(machine.runtime.copies_in_flight(), 0u);
  producer.release();
  load.finish();
  EXPECT_TRUE(machine.arrived(target, kSlot, 8 << 10));
}

TEST(DeviceLoad, CopiesBoxesFromAnyMemory) {
  Machine machine;
  constexpr int64_t kPieces = 40, kSide = 300;
  std::vector<std::byte> piece(kSide * kSide);
  for (size_t i = 0; i < piece.size(); ++i) piece[i] = Machine::value(i);
  const std::vector<int64_t> sizes = {kSide, kSide}, offsets = {3, 5}, box = {200, 100}, strides = {100, 1};
  std::vector<device::DeviceAddress> targets;
  std::vector<io::BoxCopy> copies;
  std::vector<int64_t> devices;
  for (int64_t i = 0; i < kPieces; ++i) {
    devices.push_back(i % 3 - 1);  // -1: left out
    targets.push_back(devices.back() < 0 ? 0 : machine.runtime.allocate(static_cast<int>(devices.back()), 200 * 100));
    copies.push_back({io::Box(1, sizes, offsets, box, strides), piece.data(), pointer_to(targets.back())});
  }
  DeviceLoad load(machine.streams, machine.producers);
  load.copy(copies, devices, 4);
  std::ranges::fill(piece, std::byte{0});  // it was read
  load.finish();
  for (size_t i = 0; i < targets.size(); ++i) {
    if (devices[i] < 0) continue;
    const std::byte* memory = machine.runtime.memory(targets[i], 200 * 100);
    for (uint64_t row = 0; row < 200; row += 67) {
      for (uint64_t column = 0; column < 100; column += 33) {
        ASSERT_EQ(memory[row * 100 + column], Machine::value((row + 3) * kSide + column + 5));
      }
    }
  }
}

// Items that follow one another in the file and on the device, each in an allocation of its own.
TEST(DeviceLoad, NoCopyCrossesTheBorderOfAnAllocation) {  // the fake device refuses it
  Machine machine;
  for (const uint64_t bytes : {uint64_t{96} << 10, uint64_t{512}}) {  // copied from where they are read; packed
    const auto targets = machine.runtime.allocate_neighbours(0, std::vector<uint64_t>(8, bytes));
    const std::vector<int64_t> sizes = {static_cast<int64_t>(bytes)}, none = {0}, strides = {1};
    DeviceLoad load(machine.streams, machine.producers);
    Slot slot = machine.slots.acquire();
    load.prepare({slot.data(), kSlot});
    for (uint64_t i = 0; i < 8 * bytes; ++i) slot.data()[i] = Machine::value(i);
    std::vector<read::ReadItem> items;
    for (const auto target : targets) {
      items.push_back({.file = 0,
                       .record_offset = 0,
                       .record_length = bytes,
                       .dtype = 0,
                       .chunk_sizes = sizes,
                       .box = io::Box(1, sizes, none, sizes, strides),
                       .memory = pointer_to(target),
                       .device = 0});
    }
    const auto batch = load.begin();
    for (size_t i = 0; i < items.size(); ++i) batch->add(items[i], slot.data() + i * bytes, 0, bytes);
    batch->send(std::move(slot));
    load.finish();
    for (size_t i = 0; i < targets.size(); ++i) {
      const std::byte* memory = machine.runtime.memory(targets[i], bytes);
      for (uint64_t at = 0; at < bytes; ++at) ASSERT_EQ(memory[at], Machine::value(i * bytes + at));
    }
  }
}

TEST(DeviceLoad, TellsOfEveryFailureAndLeavesNothingUnderWay) {
  for (const Fault fault : {Fault::make_stream, Fault::make_event, Fault::record_producer, Fault::after, Fault::record,
                            Fault::copy, Fault::wait, Fault::on_device}) {
    Machine machine;
    const auto target = machine.runtime.allocate(0, 8 * kSlot);
    machine.runtime.fail(fault, fault == Fault::copy || fault == Fault::on_device ? 3 : 0);
    try {
      DeviceLoad load(machine.streams, machine.producers);
      machine.load(load, 0, target, 8 * kSlot, 8 << 10);
      load.finish();
      FAIL() << static_cast<int>(fault);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind, Error::Kind::device);
    }
    EXPECT_EQ(machine.runtime.copies_in_flight(), 0u) << static_cast<int>(fault);
    std::vector<Slot> all;
    while (auto slot = machine.slots.try_acquire()) all.push_back(std::move(*slot));
    EXPECT_EQ(all.size(), 4u) << "all slots were given back";
  }
}

TEST(DeviceLoad, GoesOnWhereMemoryCannotBeLocked) {
  Machine machine;
  const auto target = machine.runtime.allocate(1, kSlot);
  machine.runtime.fail(Fault::page_lock);
  DeviceLoad load(machine.streams, machine.producers);
  machine.load(load, 1, target, kSlot, 16);
  load.finish();
  EXPECT_TRUE(machine.arrived(target, kSlot, 16));
}

// Two items of a block, of which one may not be read as a whole: what is missing of it comes by another slot.
TEST(DeviceLoad, OneCopyFillsAGapBehindAWholeItemOnly) {
  constexpr uint64_t kBytes = 100, kNext = 512;
  constexpr std::byte kOld{0x77};
  const std::vector<int64_t> sizes = {kBytes}, none = {0}, strides = {1};
  for (const uint64_t read : {kBytes, kBytes - 1}) {
    Machine machine;
    const auto block = machine.runtime.allocate(0, 2 * kNext, kOld);
    DeviceLoad load(machine.streams, machine.producers);
    Slot slot = machine.slots.acquire();
    load.prepare({slot.data(), kSlot});
    for (uint64_t i = 0; i < 2 * kBytes; ++i) slot.data()[i] = Machine::value(i);
    const auto item = [&](uint64_t at, int64_t gap_behind) {
      return read::ReadItem{.file = 0,
                            .record_offset = 0,
                            .record_length = kBytes,
                            .dtype = 0,
                            .chunk_sizes = sizes,
                            .box = io::Box(1, sizes, none, sizes, strides),
                            .memory = pointer_to(block + at),
                            .device = 0,
                            .gap_behind = gap_behind};
    };
    const read::ReadItem first = item(0, kNext - kBytes), second = item(kNext, read::kNoneFollows);
    const auto batch = load.begin();
    batch->add(first, slot.data(), 0, read);
    batch->add(second, slot.data() + kBytes, 0, kBytes);
    batch->send(std::move(slot));
    load.finish();
    const std::byte* memory = machine.runtime.memory(block, 2 * kNext);
    for (uint64_t i = 0; i < kBytes; ++i) {
      ASSERT_EQ(memory[i], i < read ? Machine::value(i) : kOld);
      ASSERT_EQ(memory[kNext + i], Machine::value(kBytes + i));
    }
    for (uint64_t i = kBytes; i < kNext; ++i) ASSERT_EQ(memory[i] == kOld, read != kBytes) << i;
    for (uint64_t i = kNext + kBytes; i < 2 * kNext; ++i) ASSERT_EQ(memory[i], kOld) << i;
  }
}

TEST(DeviceLoad, WantsAStreamOfEachDevice) {
  Machine machine;
  const auto target = machine.runtime.allocate(1, kSlot);
  DeviceLoad load(machine.streams, std::vector<Producer>{machine.producers[0]});
  EXPECT_THROW(machine.load(load, 1, target, kSlot, 8 << 10), Error);
}

}  // namespace
}  // namespace vescale_ckpt::stage
