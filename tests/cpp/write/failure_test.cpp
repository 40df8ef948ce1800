// Writes with little memory, whose calls fail: nobody waits for ever, and all slots come back.
#include <thread>

#include "base/error.h"
#include "data_files.h"

namespace vescale_ckpt::write {
namespace {

class Failure : public AccessTest {
 protected:
  io::EngineOptions options() const { return small_options(GetParam()); }

  // Small ones, and a large one that takes several transfers.
  static const std::vector<Tensor>& tensors() {
    static const std::vector<Tensor> tensors = [] {
      std::vector<Tensor> tensors;
      tensors.push_back(Tensor::of_bytes(1000));
      tensors.push_back(Tensor::of_bytes(2 * kSlotBytes + 777));
      tensors.push_back(Tensor::of_bytes(33, 24));
      return tensors;
    }();
    return tensors;
  }

  static void expect_readable(const WrittenFile& file, const io::EngineOptions& options) {
    std::vector<Memory> targets;
    std::vector<read::ReadItem> items;
    for (size_t i = 0; i < tensors().size(); ++i) {
      const Memory& target = targets.emplace_back(tensors()[i].memory.size(), i % 2 == 0 ? kTorchPlace : 24);
      items.push_back(tensors()[i].item(0, file.records[i], target.data()));
    }
    EXPECT_TRUE(read_items(file.path, items, options)->unread.empty());
    for (size_t i = 0; i < items.size(); ++i) EXPECT_TRUE(targets[i].text() == tensors()[i].memory.text());
  }
};

INSTANTIATE_TEST_SUITE_P(Each, Failure, ::testing::Values(io::Access::direct, io::Access::buffered), access_test_name);

// One slot for all, and a tensor that needs it: a worker that fails may hold the piece that the others wait for, its
// inside, without which the end cannot be written.
TEST_P(Failure, OfAWriteWakesWhoWaits) {
  io::EngineOptions tight = options();
  tight.arena_bytes = kSlotBytes;
  const Tensor large = Tensor::of_bytes(2 << 20, 24);
  for (int round = 0; round < 12; ++round) {
    bool written = false;
    for (uint64_t nth = 0; !written; ++nth) {
      ASSERT_LT(nth, 100u);
      const ArmedFault fault(Call::write, EIO, nth);
      try {
        write_data_file(path("file"), {large.source()}, tight);
        written = true;
      } catch (const Error& error) {
        EXPECT_EQ(error.code, EIO);
        EXPECT_TRUE(files().empty());
      }
      expect_slots_back(tight);
    }
    std::filesystem::remove(path("file"));
  }
}

// One slot, many threads, several files at a time: slow, but within the budget and to the end.
TEST_P(Failure, OfMemoryToGrowIsNoFailure) {
  io::EngineOptions tight = options();
  tight.threads = 6;
  tight.arena_bytes = kSlotBytes;
  std::vector<WrittenFile> written(3);
  {
    std::vector<std::jthread> threads;
    for (size_t i = 0; i < written.size(); ++i) {
      threads.emplace_back([&, i] {
        written[i] = write_data_file(path(std::to_string(i)), sources_of(tensors()), tight);
        expect_readable(written[i], tight);
      });
    }
  }
  expect_slots_back(tight);
}

}  // namespace
}  // namespace vescale_ckpt::write
