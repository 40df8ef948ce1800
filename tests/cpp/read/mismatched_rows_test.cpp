// Rows that do not fit their file: refused or left to the caller, never read as if they did.
#include <algorithm>
#include <cstring>
#include <random>

#include "base/error.h"
#include "data_files.h"
#include "error_of.h"
#include "tensors.h"

namespace vescale_ckpt::read {
namespace {

const io::EngineOptions kOptions = small_options(io::Access::direct, 1);

class MismatchedRows : public ScratchTest {
 protected:
  // Small, large, small, with other bytes between.
  void SetUp() override {
    ScratchTest::SetUp();
    tensors_.emplace_back("float32", Sizes{10, 10}, kTorchPlace, 1);
    tensors_.emplace_back("float32", Sizes{700, 1001}, kTorchPlace, 2);
    tensors_.emplace_back("int16", Sizes{7}, kTorchPlace, 3);
    file_ = write_data_file(path("file"), sources_of(tensors_), kOptions);
    for (const Tensor& tensor : tensors_) targets_.emplace_back(tensor.memory.size());
  }

  std::vector<ReadItem> items() const {
    std::vector<ReadItem> items;
    for (size_t i = 0; i < tensors_.size(); ++i) {
      items.push_back(tensors_[i].item(0, file_.records[i], targets_[i].data()));
    }
    return items;
  }

  // Which item is named as damaged, or given back to the caller; kNoItem if none.
  int64_t damaged(const std::vector<ReadItem>& items) const {
    try {
      const auto report = read_items(file_.path, items, kOptions);
      if (report->unread.empty()) return Error::kNoItem;
      EXPECT_EQ(report->unread.size(), 1u);
      return report->unread[0];
    } catch (const Error& error) {
      EXPECT_EQ(error.kind, Error::Kind::corrupt) << error.what();
      EXPECT_EQ(error.path, file_.path);
      return error.item;
    }
  }

  std::vector<Tensor> tensors_;
  std::vector<Memory> targets_;
  WrittenFile file_;
};

// Rows that do not fit the file: an error, or left to the caller, or right by luck, but never wrong bytes.
TEST_F(MismatchedRows, OfTheMetadataIsSurvived) {
  std::mt19937 random(1);
  const char* const names[] = {"float32", "int32", "int16", "uint8", "float64", "bfloat16", "float8_e5m2"};
  const Sizes shapes[] = {{10, 10}, {100}, {20, 5}, {7}, {}, {0}, {9, 10}, {3, 3, 3}, {700, 1001}, {1001, 700}};
  for (int round = 0; round < 1500; ++round) {
    const size_t which = random() % 3;
    write::PlacedRecord placed = file_.records[which];
    switch (random() % 4) {
      case 0:
        placed.offset += 64 * (random() % 5);
        break;
      case 1:
        placed.offset = random() % (file_.bytes + 100);
        break;
      case 2:
        placed.length = random() % 4000;
        break;
      default:
        break;
    }
    const size_t small_shapes = std::size(shapes) - (which == 1 && random() % 5 == 0 ? 0 : 2);
    const Tensor claimed(names[random() % std::size(names)], shapes[random() % small_shapes]);
    if (random() % 2 == 0) placed.length = claimed.source().framing->total_bytes();
    const Memory target(claimed.memory.size());
    Sizes sizes = claimed.sizes, offsets(sizes.size(), 0);
    if (!sizes.empty() && sizes[0] > 1 && random() % 2 == 0) {
      sizes[0] /= 2;
      offsets[0] = 1;
    }
    const Tensor& truth = tensors_[which];
    const bool right = placed.offset == file_.records[which].offset && claimed.dtype == truth.dtype &&
                       claimed.sizes == truth.sizes && placed.length == file_.records[which].length;
    try {
      const auto report =
          read_items(file_.path, {claimed.box_item(0, placed, offsets, sizes, target.data())}, kOptions);
      if (!report->unread.empty()) continue;
      ASSERT_TRUE(right) << format::dtypes()[claimed.dtype].name << " at " << placed.offset << " for record " << which;
      const Memory box = truth.box(offsets, sizes);
      ASSERT_TRUE(target.text().substr(0, box.size()) == box.text());
    } catch (const Error& error) {
      ASSERT_FALSE(right) << error.what();
    }
  }
}

// Another dtype of equal size: whole or in part, it is not the tensor that was asked for.
TEST_F(MismatchedRows, OfADtypeIsSeenInPartsToo) {
  const Tensor claimed("int32", {700, 1001});
  ASSERT_EQ(claimed.source().framing->total_bytes(), file_.records[1].length);
  const Memory target(claimed.memory.size());
  EXPECT_EQ(damaged({claimed.item(0, file_.records[1], target.data())}), 0) << "whole";
  EXPECT_EQ(damaged({claimed.box_item(0, file_.records[1], {5, 0}, {10, 1001}, target.data())}), 0) << "part";
}

// Two rows may claim overlapping ranges. The true one must not suffer.
TEST_F(MismatchedRows, ByOverlappingRowsIsSeen) {
  const Tensor claimed("uint8", {0});
  const write::PlacedRecord inside{file_.records[0].offset + 64, claimed.source().framing->total_bytes(), 0};
  const Tensor large("float32", {1000});
  const WrittenFile other = write_data_file(path("other"), {large.source()}, kOptions);
  const Memory target(large.memory.size());
  for (const bool verify : {true, false}) {
    std::memset(target.data(), 0, target.size());
    expect_slots_back(kOptions);
    const std::vector<ReadItem> rows = {large.item(0, other.records[0], target.data()),
                                        claimed.item(0, inside, target.data())};
    EXPECT_NO_THROW({
      const auto report = read_items(other.path, rows, kOptions, verify);
      EXPECT_EQ(report->unread, std::vector<uint32_t>{1});
    });
    EXPECT_TRUE(target.text() == large.memory.text()) << (verify ? "verified" : "not verified");
  }
}

TEST_F(MismatchedRows, RowsThatDisagreeAreRefused) {
  std::vector<ReadItem> rows = items();
  rows.push_back(rows[0]);
  rows.back().record_length += 1;
  EXPECT_EQ(row_of_error([&] { read_items(file_.path, rows, kOptions); }), 3);
}

}  // namespace
}  // namespace vescale_ckpt::read
