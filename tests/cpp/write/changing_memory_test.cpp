// Another thread changes tensors while they are written: what is in the file agrees with its checksums.
#include <dlfcn.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "data_files.h"
#include "tensors.h"
#include "write/placed_boxes.h"

namespace {
std::function<void()>* before_write = nullptr;
}

// In place of the C library's, which the engine calls for each write.
extern "C" ssize_t pwritev2(int fd, const iovec* parts, int count, off_t offset, int flags) {
  if (before_write != nullptr) (*before_write)();
  // Not the system call: the C library does without it where the kernel, or an emulator, has none.
  static const auto next = reinterpret_cast<decltype(&pwritev2)>(::dlsym(RTLD_NEXT, "pwritev2"));
  return next(fd, parts, count, offset, flags);
}

namespace vescale_ckpt::write {
namespace {

// Each call that writes finds the memory changed since it was checksummed.
class ChangingMemory : public AccessTest {
 protected:
  void SetUp() override {
    AccessTest::SetUp();
    before_write = &change_;
  }
  void TearDown() override {
    before_write = nullptr;
    AccessTest::TearDown();
  }

  Memory& memory(uint64_t bytes, uint64_t place) {
    Memory& made = memory_.emplace_back(bytes, place);
    fill_random(made.bytes(), bytes);
    return made;
  }

  io::EngineOptions options_ = small_options(GetParam(), 1);

 private:
  std::deque<Memory> memory_;
  std::function<void()> change_ = [this] {
    for (const Memory& each : memory_) {
      for (uint64_t at = 0; at < each.size(); at += 4000) each.data()[at] ^= std::byte{255};
    }
  };
};

INSTANTIATE_TEST_SUITE_P(Ways, ChangingMemory, ::testing::ValuesIn(every_access()), access_test_name);

TEST_P(ChangingMemory, IsStoredWithTheChecksumsOfWhatIsStored) {
  const std::vector<Tensor> tensors = [] {
    std::vector<Tensor> made;
    for (const uint64_t bytes : {1000u, 100u, 7u, 5u << 20, 5u << 19}) made.push_back(Tensor::of_bytes(bytes));
    return made;
  }();
  for (const bool short_writes : {false, true}) {  // what is left of a short write is read once more
    std::vector<RecordSource> sources = sources_of(tensors);
    for (size_t i = 0; i < sources.size(); ++i) {
      sources[i].data = memory(sources[i].bytes, i % 2 == 0 ? kTorchPlace : 4).data();
    }
    sources.back().strided.emplace(1, std::vector<int64_t>{1024, 2560}, std::vector<int64_t>{0, 0},
                                   std::vector<int64_t>{1024, 2560}, std::vector<int64_t>{1, 1024});
    std::optional<ArmedFault> fault;
    if (short_writes) fault.emplace(Call::write, 0, 0, 1000);
    const WrittenFile file = write_data_file(path(short_writes ? "short" : "file"), sources, options_);
    fault.reset();
    std::vector<Memory> targets;
    std::vector<read::ReadItem> items;
    for (size_t i = 0; i < tensors.size(); ++i) {
      items.push_back(tensors[i].item(0, file.records[i], targets.emplace_back(sources[i].bytes).data()));
    }
    EXPECT_TRUE(read_items(file.path, items, options_)->unread.empty());
    for (size_t i = 0; i < tensors.size(); ++i) {
      EXPECT_EQ(file.records[i].crc, crc32(0, targets[i].data(), targets[i].size())) << i;
    }
  }
}

// Columns of a shared file, in short runs and in long ones.
TEST_P(ChangingMemory, IsChecksummedAsItIsInASharedFile) {
  for (const std::array<int64_t, 3>& form : {std::array<int64_t, 3>{200, 1003, 400}, {3, 700'001, 300'000}}) {
    const auto [rows, columns, cut] = form;
    const uint64_t begin = kTorchPlace, end = begin + static_cast<uint64_t>(rows * columns);
    write_file(path("file"), std::string(end, '?'));
    std::vector<int64_t> table;
    for (const auto& [first, width] : {std::pair(int64_t{0}, cut), std::pair(cut, columns - cut)}) {
      const Memory& part = memory(static_cast<uint64_t>(rows * width), first == 0 ? kTorchPlace : 4);
      for (const int64_t word :
           {int64_t{0}, static_cast<int64_t>(begin), rows * columns, int64_t{-1}, int64_t{dtype_code("uint8")},
            int64_t{2}, rows, columns, int64_t{0}, first, rows, width, address(part), width, int64_t{1}}) {
        table.push_back(word);
      }
    }
    BoxWriter writer({path("file")}, options_);
    writer.write(table);
    expect_block_checksums({writer.finish(false)}, read_file(path("file")), begin, end);
  }
}

}  // namespace
}  // namespace vescale_ckpt::write
