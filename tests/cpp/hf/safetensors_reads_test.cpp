// Tensors of safetensors files, read by the tables of a checkpoint.
#include "hf/safetensors_reads.h"

#include "data_files.h"
#include "tables.h"

namespace vescale_ckpt::hf {
namespace {

constexpr uint32_t kBytes = 4;  // in safetensors_dtypes()
constexpr int64_t kRows = 900, kColumns = 1003;

// Files of an empty tensor and a matrix of bytes.
class SafetensorsReadsTest : public ScratchTest {
 protected:
  std::string write(const std::string& name, const Memory& matrix, const std::string& note = {}) const {
    const SafetensorsLayout layout({{"empty", kBytes, {0}}, {"matrix", kBytes, {kRows, kColumns}}}, {{"note", note}});
    write::FileWriter writer(path(name), layout.file_bytes(), options_, true);
    write_safetensors(writer, layout, std::vector<const std::byte*>{nullptr, matrix.data()}, true);
    return path(name);
  }

  Memory random_matrix(uint64_t seed) const {
    Memory matrix(kRows * kColumns);
    fill_random(matrix.bytes(), seed);
    return matrix;
  }

  // A row of a box of so many rows, from `first` on, in the middle of the columns.
  static constexpr int64_t kLeft = 100, kWidth = 200;
  std::vector<int64_t> row(int64_t number, const std::string& file, int64_t first, int64_t rows,
                           const Memory& target) const {
    const auto opened = SafetensorsFile::open(file, options_, true);
    const SafetensorsHeader::Tensor& tensor = opened->header.tensors()[1];
    return {number,
            static_cast<int64_t>(tensor.begin),
            static_cast<int64_t>(tensor.end - tensor.begin),
            int64_t{opened->head_crc},
            code_of("uint8"),
            2,
            kRows,
            kColumns,
            first,
            kLeft,
            rows,
            kWidth,
            address(target),
            kWidth,
            1};
  }

  static void expect_box(const Memory& target, const Memory& matrix, int64_t first, int64_t rows) {
    for (int64_t r = 0; r < rows; ++r) {
      const auto from = static_cast<size_t>((first + r) * kColumns + kLeft);
      ASSERT_EQ(target.text().substr(static_cast<size_t>(r * kWidth), kWidth), matrix.text().substr(from, kWidth));
    }
  }

  const io::EngineOptions options_ = small_options(io::Access::direct);
};

TEST_F(SafetensorsReadsTest, ReadsBoxesOfMoreFilesThanStayOpen) {
  constexpr int64_t kFiles = 70;
  const Memory matrix = random_matrix(1);
  const std::string first = write("0", matrix);
  std::vector<std::string> paths;
  std::vector<Memory> targets;
  std::vector<int64_t> table;
  for (int64_t number = 0; number < kFiles; ++number) {
    paths.push_back(path(std::to_string(number)));
    if (number != 0) std::filesystem::copy_file(first, paths.back());
    targets.emplace_back(10 * kWidth);
    const auto added = row(number, first, number, 10, targets.back());
    table.insert(table.end(), added.begin(), added.end());
  }
  SafetensorsReads reads(true, options_);
  for (int time = 0; time < 2; ++time) {
    const auto report = reads.read(paths, table);
    EXPECT_EQ(report->unverified_bytes, 0u);
    EXPECT_EQ(report->needed_bytes, uint64_t{kFiles * 10 * kWidth});
    for (int64_t number = 0; number < kFiles; ++number) {
      expect_box(targets[static_cast<size_t>(number)], matrix, number, 10);
      fill_random(targets[static_cast<size_t>(number)].bytes(), 7);
    }
  }
}

TEST_F(SafetensorsReadsTest, NoticesAnotherFileOfTheSameName) {
  const Memory matrix = random_matrix(1), target(10 * kWidth);
  const std::vector<std::string> paths = {write("file", matrix)};
  const auto table = row(0, paths[0], 5, 10, target);
  SafetensorsReads reads(false, options_);
  reads.read(paths, table);
  expect_box(target, matrix, 5, 10);
  std::filesystem::rename(write("new", matrix, "another"), paths[0]);
  EXPECT_EQ(row_of_error([&] { reads.read(paths, table); }, Error::Kind::corrupt), 0);
  SafetensorsReads fresh(false, options_);
  EXPECT_EQ(row_of_error([&] { fresh.read(paths, table); }, Error::Kind::corrupt), 0);
  fresh.read(paths, row(0, paths[0], 5, 10, target));
}

TEST_F(SafetensorsReadsTest, RefusesRowsThatNameNoTensor) {
  const Memory matrix = random_matrix(1), target(10 * kWidth);
  const std::vector<std::string> paths = {write("file", matrix)};
  const auto sound = row(0, paths[0], 5, 10, target);
  SafetensorsReads reads(true, options_);
  const auto refused = [&](size_t word, int64_t change) {
    std::vector<int64_t> table = sound;  // a sound row before it
    table.insert(table.end(), sound.begin(), sound.end());
    table[sound.size() + word] += change;
    EXPECT_EQ(row_of_error([&] { reads.read(paths, table); }), 1);
  };
  refused(0, 1);      // a file that is none
  refused(1, 1);      // another offset
  refused(2, -1);     // another length
  refused(6, 1);      // another shape
  refused(8, kRows);  // a box that leaves it
  reads.read(paths, sound);
}

}  // namespace
}  // namespace vescale_ckpt::hf
