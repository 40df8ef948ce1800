// Safetensors files by every way that bytes may take.
#include "hf/safetensors_file.h"

#include <algorithm>
#include <random>

#include "data_files.h"
#include "hf/safetensors_reads.h"
#include "tables.h"

namespace vescale_ckpt::hf {
namespace {

constexpr uint32_t kU8 = 4;  // in safetensors_dtypes()

// Tensors of bytes: below, at and above the borders of blocks, cells, slots and large ones.
const std::vector<uint64_t> kSizes = {0,
                                      1,
                                      63,
                                      4095,
                                      4096,
                                      4097,
                                      0,
                                      io::kLargeBody,
                                      262'144,
                                      io::kLargeBody - 1,
                                      70'000,
                                      io::kLargeBody + 4096,
                                      3 * kSlotBytes,
                                      12'345,
                                      kSlotBytes + 1,
                                      io::kLargeBody + 77,
                                      1,
                                      5 * kSlotBytes + 999};

struct Saved {
  std::vector<Memory> memory;
  std::vector<std::string> names;

  explicit Saved(const std::vector<uint64_t>& sizes, uint64_t place = kTorchPlace) {
    for (const uint64_t bytes : sizes) {
      memory.emplace_back(bytes, place);
      fill_random(memory.back().bytes(), memory.size());
      names.push_back(std::to_string(1000 + names.size()));  // in order
    }
  }

  SafetensorsLayout layout() const {
    std::vector<SafetensorsLayout::Tensor> tensors;
    for (size_t i = 0; i < memory.size(); ++i) tensors.push_back({names[i], kU8, {memory[i].size()}});
    return {std::move(tensors), {{"k", "v"}}};
  }

  void write(const std::string& path, const io::EngineOptions& options, uint64_t* in_place = nullptr) const {
    const SafetensorsLayout laid_out = layout();
    std::vector<const std::byte*> data;
    for (const Memory& tensor : memory) data.push_back(tensor.data());
    write::FileWriter writer(path, laid_out.file_bytes(), options, true);
    EXPECT_EQ(write_safetensors(writer, laid_out, data, true), laid_out.file_bytes());
    EXPECT_EQ(std::filesystem::file_size(path), laid_out.file_bytes());
    if (in_place != nullptr) *in_place = writer.stats().in_place;
  }
};

using File = std::shared_ptr<const SafetensorsFile>;

// A row of a table to read a box of a tensor.
void add_row(std::vector<int64_t>& table, const SafetensorsFile& file, size_t number, const Sizes& shape,
             const Sizes& offsets, const Sizes& sizes, const Memory& target) {
  const SafetensorsHeader::Tensor& tensor = file.header.tensors()[number];
  table.insert(table.end(), {0, static_cast<int64_t>(tensor.begin), static_cast<int64_t>(tensor.end - tensor.begin),
                             int64_t{file.head_crc}, code_of("uint8"), std::ssize(shape)});
  for (const Sizes& list : {shape, offsets, sizes}) table.insert(table.end(), list.begin(), list.end());
  table.push_back(address(target));
  const Sizes strides = row_major(sizes);
  table.insert(table.end(), strides.begin(), strides.end());
}

std::vector<int64_t> whole_rows(const SafetensorsFile& file, const std::vector<Memory>& targets) {
  std::vector<int64_t> table;
  for (size_t i = 0; i < targets.size(); ++i) {
    const Sizes shape = {static_cast<int64_t>(targets[i].size())};
    add_row(table, file, i, shape, {0}, shape, targets[i]);
  }
  return table;
}

std::unique_ptr<read::ReadReport> read_file(const File& file, const std::vector<int64_t>& table, bool verify,
                                            const io::EngineOptions& options) {
  const std::vector<std::string> paths = {file->file->path()};
  return SafetensorsReads(file, verify, options).read(paths, table);
}

class SafetensorsModes : public AccessTest {
 protected:
  io::EngineOptions options() const {
    io::EngineOptions options = small_options(GetParam());
    options.read_cached = false;
    return options;
  }
};

TEST_P(SafetensorsModes, GivesBackWhatWasWritten) {
  for (const uint64_t place : {kTorchPlace, uint64_t{0}, uint64_t{8}}) {
    const Saved saved(kSizes, place);
    saved.write(path("file"), options());
    const File file = SafetensorsFile::open(path("file"), options(), true);
    const SafetensorsHeader& header = file->header;
    ASSERT_EQ(header.tensors().size(), kSizes.size());
    EXPECT_TRUE(header.has_checksums());
    std::vector<Memory> targets;
    for (size_t i = 0; i < kSizes.size(); ++i) {
      ASSERT_EQ(header.tensors()[i].name, saved.names[i]);
      ASSERT_EQ(
          format::joined_crc(header.tensors()[i].begin, header.tensors()[i].end, header.blocks(header.tensors()[i])),
          crc32(0, saved.memory[i].data(), kSizes[i]));
      targets.emplace_back(kSizes[i], place);
    }
    const auto report = read_file(file, whole_rows(*file, targets), true, options());
    EXPECT_EQ(report->unverified_bytes, 0u);
    for (size_t i = 0; i < kSizes.size(); ++i) ASSERT_EQ(targets[i].text(), saved.memory[i].text()) << i;
    std::filesystem::remove(path("file"));
  }
}

TEST_P(SafetensorsModes, LetsLargeTensorsTravelFromTheirOwnMemory) {
  const Saved saved({8 * io::kLargeBody, 4 * io::kLargeBody, 2 * io::kLargeBody});
  uint64_t in_place = 0;
  saved.write(path("file"), options(), &in_place);
  EXPECT_GE(in_place, 14 * io::kLargeBody - 6 * kBlock);
}

TEST_P(SafetensorsModes, ReadsBoxes) {
  constexpr int64_t kRows = 700, kColumns = 1003;
  const Saved saved({77, kRows * kColumns, 12});
  std::vector<SafetensorsLayout::Tensor> tensors = {
      {"1000", kU8, {77}}, {"1001", kU8, {kRows, kColumns}}, {"1002", kU8, {12}}};
  const SafetensorsLayout layout(tensors, {});
  write::FileWriter writer(path("file"), layout.file_bytes(), options(), true);
  write_safetensors(
      writer, layout,
      std::vector<const std::byte*>{saved.memory[0].data(), saved.memory[1].data(), saved.memory[2].data()}, false);
  const File file = SafetensorsFile::open(path("file"), options(), true);
  std::mt19937_64 random(1);
  for (int i = 0; i < 60; ++i) {
    const auto row = static_cast<int64_t>(random() % kRows), column = static_cast<int64_t>(random() % kColumns);
    const auto rows = 1 + static_cast<int64_t>(random() % static_cast<uint64_t>(kRows - row));
    const auto columns = 1 + static_cast<int64_t>(random() % static_cast<uint64_t>(kColumns - column));
    const Memory target(static_cast<uint64_t>(rows * columns));
    std::vector<int64_t> table;
    add_row(table, *file, 1, {kRows, kColumns}, {row, column}, {rows, columns}, target);
    read_file(file, table, i % 3 != 0, options());
    for (int64_t r = 0; r < rows; ++r) {
      const auto from = static_cast<size_t>((row + r) * kColumns + column);
      ASSERT_EQ(target.text().substr(static_cast<size_t>(r * columns), static_cast<size_t>(columns)),
                saved.memory[1].text().substr(from, static_cast<size_t>(columns)));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ways, SafetensorsModes, ::testing::ValuesIn(every_access()), access_test_name);

class SafetensorsFileTest : public ScratchTest {
 protected:
  const io::EngineOptions options_ = small_options(io::Access::direct);

  void flip(uint64_t offset) const {
    std::fstream file(path("file"), std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(static_cast<std::streamoff>(offset));
    const char byte = static_cast<char>(file.get() ^ 0x10);
    file.seekp(static_cast<std::streamoff>(offset)).write(&byte, 1);
  }
};

TEST_F(SafetensorsFileTest, NamesTheTensorAndTheBlockOfADamagedByte) {
  const Saved saved({5000, io::kLargeBody + 5, 100, 300'000});
  saved.write(path("file"), options_);
  const File file = SafetensorsFile::open(path("file"), options_, true);
  std::vector<Memory> targets;
  for (const Memory& memory : saved.memory) targets.emplace_back(memory.size());
  for (int64_t i = 0; i < 4; ++i) {
    const SafetensorsHeader::Tensor& tensor = file->header.tensors()[static_cast<size_t>(i)];
    for (const uint64_t at : {tensor.begin, (tensor.begin + tensor.end) / 2, tensor.end - 1}) {
      flip(at);
      try {
        read_file(file, whole_rows(*file, targets), true, options_);
        FAIL() << "tensor " << i << ", offset " << at;
      } catch (const Error& error) {
        EXPECT_EQ(error.kind, Error::Kind::corrupt) << error.what();
        EXPECT_EQ(error.item, i);
        EXPECT_EQ(error.path, path("file"));
        EXPECT_EQ(error.offset, std::max(tensor.begin, align_down(at, format::kChecksumBlock)));
      }
      const auto report = read_file(file, whole_rows(*file, targets), false, options_);
      EXPECT_NE(targets[static_cast<size_t>(i)].text(), saved.memory[static_cast<size_t>(i)].text());
      flip(at);
    }
  }
  read_file(file, whole_rows(*file, targets), true, options_);
}

TEST_F(SafetensorsFileTest, LeavesAnUnfinishedFileUnreadableAndThenNone) {
  const Saved saved({io::kLargeBody});
  const SafetensorsLayout layout = saved.layout();
  {
    write::FileWriter writer(path("file"), layout.file_bytes(), options_, true);
    const std::vector<write::RecordSource> sources = {{nullptr, saved.memory[0].data(), io::kLargeBody, {}}};
    writer.write_tiled(sources, layout.data_begin());
    EXPECT_THROW(SafetensorsFile::open(path("file"), options_, true), Error);  // the header comes last
  }
  EXPECT_EQ(files().size(), 0u);
}

TEST_F(SafetensorsFileTest, StaysTheSameFileWhenAnotherTakesItsName) {
  const Saved saved({70'000}), other({70'001});
  saved.write(path("file"), options_);
  const File file = SafetensorsFile::open(path("file"), options_, true);
  other.write(path("new"), options_);
  std::filesystem::rename(path("new"), path("file"));
  std::vector<Memory> targets;
  targets.emplace_back(70'000);
  read_file(file, whole_rows(*file, targets), true, options_);
  EXPECT_EQ(targets[0].text(), saved.memory[0].text());
}

TEST_F(SafetensorsFileTest, RefusesTablesThatMakeNoSense) {
  const Saved saved({10});
  saved.write(path("file"), options_);
  const File file = SafetensorsFile::open(path("file"), options_, true);
  const Memory target(10);
  std::vector<int64_t> sound;
  add_row(sound, *file, 0, {10}, {2}, {3}, target);
  read_file(file, sound, true, options_);
  const auto changed = [&](size_t word, int64_t change, Error::Kind kind = Error::Kind::invalid) {
    std::vector<int64_t> table = sound;
    table[word] += change;
    return row_of_error([&] { read_file(file, table, true, options_); }, kind);
  };
  EXPECT_EQ(changed(0, 1), 0);  // another file
  EXPECT_EQ(changed(0, -1), 0);
  EXPECT_EQ(changed(1, 1), 0);                        // another tensor
  EXPECT_EQ(changed(3, 1, Error::Kind::corrupt), 0);  // another head
  EXPECT_EQ(changed(4, 1000), 0);                     // no dtype
  EXPECT_EQ(changed(5, 1), 0);                        // dimensions
  EXPECT_EQ(changed(6, 1), 0);                        // another shape
  EXPECT_EQ(changed(7, 6), 0);                        // leaves the tensor
  EXPECT_EQ(changed(7, -3), 0);
}

}  // namespace
}  // namespace vescale_ckpt::hf
