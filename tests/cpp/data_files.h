// Data files written and read with small slots, so that small tensors meet every border, and tests that run with each
// way that bytes may take to a file.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "base/crc32.h"
#include "io/file.h"
#include "scratch.h"
#include "tensors.h"
#include "write/placed_boxes.h"

namespace vescale_ckpt {

inline std::string access_test_name(const ::testing::TestParamInfo<io::Access>& info) {
  return io::access_name(info.param);
}

class AccessTest : public ScratchTest, public ::testing::WithParamInterface<io::Access> {
 protected:
  io::Access access() const { return GetParam(); }

  void SetUp() override {
    ScratchTest::SetUp();
    if (access() != io::Access::direct) return;
    const bool has_direct = io::File::create(path("probe"), access())->access() == io::Access::direct;
    std::filesystem::remove(path("probe"));
    if (!has_direct) GTEST_SKIP() << "no direct I/O in " << directory();
  }
};

// The smallest slots that hold every record that is packed: nine cells.
inline constexpr uint64_t kSlotBytes = 9 * (256 << 10);
inline constexpr uint64_t kSlots = 4;

inline io::EngineOptions small_options(io::Access access, unsigned threads = 3) {
  io::EngineOptions options;
  options.widest = access;
  options.threads = threads;
  options.slot_bytes = kSlotBytes;
  options.arena_bytes = kSlots * kSlotBytes;
  return options;
}

struct WrittenFile {
  std::string path;
  std::vector<write::PlacedRecord> records;
  uint64_t bytes = 0;
  uint64_t in_place = 0, slots = 0;  // bytes by the way they took
  uint64_t by_access[2] = {};
};

inline WrittenFile write_data_file(const std::string& path, const std::vector<write::RecordSource>& sources,
                                   const io::EngineOptions& options, bool checksums = true) {
  std::vector<int64_t> sizes;
  for (const write::RecordSource& source : sources) sizes.push_back(static_cast<int64_t>(source.bytes));
  const uint64_t space = write::FileWriter::space_for(sizes);
  write::FileWriter writer(path, space, options, checksums);
  WrittenFile file{path, writer.write(sources)};
  file.bytes = writer.finish(false);
  EXPECT_EQ(std::filesystem::file_size(path), file.bytes);
  EXPECT_LE(file.bytes, space);
  file.in_place = writer.stats().in_place;
  file.slots = writer.stats().slots;
  for (size_t i = 0; i < 2; ++i) file.by_access[i] = writer.stats().by_access[i];
  return file;
}

inline std::vector<write::RecordSource> sources_of(const std::vector<Tensor>& tensors) {
  std::vector<write::RecordSource> sources;
  for (const Tensor& tensor : tensors) sources.push_back(tensor.source());
  return sources;
}

inline std::unique_ptr<read::ReadReport> read_items(const std::string& path, const std::vector<read::ReadItem>& items,
                                                    const io::EngineOptions& options, bool verify = true) {
  return read::read_tensors(std::vector{path}, items, verify, options);
}

// Checks the block checksums of the tensor in [begin, end) of a file, which its writers' contributions
// (PlacedBoxes::take_checksums) make up.
inline void expect_block_checksums(const std::vector<std::vector<uint32_t>>& contributions, std::string_view file,
                                   uint64_t begin, uint64_t end) {
  constexpr size_t kHead = write::PlacedBoxes::kChecksumHead;
  std::vector<uint32_t> sums(format::cells(begin, end));
  for (const std::vector<uint32_t>& words : contributions) {
    for (size_t at = 0; at < words.size(); at += kHead + words[at + 6]) {
      EXPECT_EQ(words[at] + words[at + 2] + words[at + 4], 0u);
      for (uint32_t i = 0; words[at + 1] == begin && i < words[at + 6]; ++i) {
        sums.at(words[at + 5] + i) ^= words[at + kHead + i];
      }
    }
  }
  uint64_t at = begin;
  for (const uint32_t sum : sums) {
    const uint64_t next = std::min(end, align_down(at, format::kChecksumBlock) + format::kChecksumBlock);
    EXPECT_EQ(sum, crc32(0, file.data() + at, next - at)) << at;
    at = next;
  }
}

// Puts the pages of a file out of the cache, so that the next reader goes to the disk.
inline void drop_cache(const std::string& path) {
  const int fd = system::open(path.c_str(), O_RDONLY, 0);
  EXPECT_EQ(system::sync(fd), 0);
  EXPECT_EQ(::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED), 0);
  system::close(fd);
}

// Takes all slots, and puts other bytes into them, so that nothing of a file is in them by chance. Where one was not
// given back, the alarm ends the process.
inline void expect_slots_back(const io::EngineOptions& options) {
  Arena& arena = shared_arena(options.slot_bytes, options.arena_bytes);
  std::vector<Slot> slots;
  ::alarm(60);
  while (slots.size() < arena.slots()) std::memset(slots.emplace_back(arena.acquire()).data(), 0x5A, 1 << 16);
  ::alarm(0);
}

}  // namespace vescale_ckpt
