// Damaged files and lying metadata: found and named, never read as if they were well.
#include <algorithm>
#include <cstring>
#include <random>

#include "base/error.h"
#include "data_files.h"

namespace vescale_ckpt::read {
namespace {

constexpr uint64_t kCell = format::kChecksumBlock;

const io::EngineOptions kOptions = small_options(io::Access::direct, 1);

class Damage : public ScratchTest {
 protected:
  // Small, large, small, with other bytes between.
  void SetUp() override {
    ScratchTest::SetUp();
    tensors_.emplace_back("float32", Sizes{10, 10}, kTorchPlace, 1);
    tensors_.emplace_back("float32", Sizes{700, 1001}, kTorchPlace, 2);
    tensors_.emplace_back("int16", Sizes{7}, kTorchPlace, 3);
    file_ = write_data_file(path("file"), sources_of(tensors_), kOptions);
    content_ = read_file(file_.path);
    for (const Tensor& tensor : tensors_) targets_.emplace_back(tensor.memory.size());
  }

  std::vector<ReadItem> items() const {
    std::vector<ReadItem> items;
    for (size_t i = 0; i < tensors_.size(); ++i) {
      items.push_back(tensors_[i].item(0, file_.records[i], targets_[i].data()));
    }
    return items;
  }

  uint64_t body(size_t record) const {
    return file_.records[record].offset + tensors_[record].source().framing->prologue().size();
  }
  uint64_t body_end(size_t record) const { return body(record) + tensors_[record].memory.size(); }

  void put(uint64_t offset, std::string_view bytes) const {
    std::fstream(file_.path, std::ios::in | std::ios::out | std::ios::binary)
        .seekp(static_cast<std::streamoff>(offset))
        .write(bytes.data(), std::ssize(bytes));
  }
  void flip(uint64_t offset) const {
    const char flipped = static_cast<char>(content_[offset] ^ (1 << (offset % 8)));
    put(offset, {&flipped, 1});
  }
  void mend(uint64_t offset) const { put(offset, {&content_[offset], 1}); }

  // Which item is named as damaged, or given back to the caller; kNoItem if none.
  int64_t damaged(const std::vector<ReadItem>& items, Error* found = nullptr) const {
    try {
      const auto report = read_items(file_.path, items, kOptions);
      if (report->unread.empty()) return Error::kNoItem;
      EXPECT_EQ(report->unread.size(), 1u);
      return report->unread[0];
    } catch (const Error& error) {
      EXPECT_EQ(error.kind, Error::Kind::corrupt) << error.what();
      EXPECT_EQ(error.path, file_.path);
      if (found != nullptr) *found = error;
      return error.item;
    }
  }

  std::vector<Tensor> tensors_;
  std::vector<Memory> targets_;
  WrittenFile file_;
  std::string content_;
};

TEST_F(Damage, InAnyByteOfASmallRecordIsFound) {
  for (const size_t which : {0, 2}) {
    const auto [offset, length, crc] = file_.records[which];
    const std::vector<ReadItem> one = {items()[which]};
    for (uint64_t at = offset; at < offset + length; ++at) {
      flip(at);
      ASSERT_EQ(damaged(one), 0) << "byte " << at - offset << " of record " << which;
      mend(at);
    }
    EXPECT_EQ(damaged(one), Error::kNoItem);
  }
}

TEST_F(Damage, InALargeRecordIsFoundAndItsBlockNamed) {
  const uint64_t begin = body(1), end = body_end(1), head = align_up(begin, kBlock), tail = align_down(end, kBlock);
  const uint64_t places[] = {begin,
                             begin + 100,
                             head - 1,
                             head,
                             align_up(begin, kCell) - 1,
                             align_up(begin, kCell),
                             align_up(begin, kCell) + kCell,
                             kSlotBytes - 1,
                             kSlotBytes,
                             tail - 1,
                             tail,
                             end - 1};
  for (const uint64_t at : places) {
    ASSERT_TRUE(at >= begin && at < end) << at;
    flip(at);
    Error error = Error::invalid("none");
    ASSERT_EQ(damaged(items(), &error), 1) << at;
    EXPECT_LE(error.offset, at);
    EXPECT_LT(at, error.offset + kCell);
    EXPECT_EQ(error.offset, std::max(begin, align_down(at, kCell)));
    mend(at);
  }
  for (uint64_t at = file_.records[1].offset; at < begin; at += 41) {  // prologue
    flip(at);
    ASSERT_EQ(damaged(items()), 1) << at;
    mend(at);
  }
  for (uint64_t at = end; at < file_.records[1].offset + file_.records[1].length; at += 41) {  // epilogue
    flip(at);
    ASSERT_EQ(damaged(items()), 1) << at;
    mend(at);
  }
  EXPECT_EQ(damaged(items()), Error::kNoItem);
}

// Boxes are checked by the blocks that they touch, and by no others.
TEST_F(Damage, UnderABoxIsFound) {
  const Memory target(100 * 1001 * 4);
  const auto box = [&](int64_t row) {
    return std::vector{tensors_[1].box_item(0, file_.records[1], {row, 0}, {100, 1001}, target.data())};
  };
  const uint64_t row_bytes = 1001 * 4;
  for (const int64_t row : {0, 250, 600}) {
    const uint64_t from = body(1) + static_cast<uint64_t>(row) * row_bytes, to = from + 100 * row_bytes;
    for (const uint64_t at : {from, (from + to) / 2, to - 1}) {
      flip(at);
      Error error = Error::invalid("none");
      ASSERT_EQ(damaged(box(row), &error), 0) << row;
      EXPECT_LE(error.offset, at);
      EXPECT_LT(at, error.offset + kCell);
      ASSERT_EQ(damaged(box(row < 300 ? 600 : 0)), Error::kNoItem);
      mend(at);
    }
  }
}

TEST_F(Damage, OfTheChecksumTableCostsOnlyTime) {
  const uint64_t table = align_up(file_.records[2].offset + file_.records[2].length, kBlock);
  ASSERT_LT(table, file_.bytes);
  const Memory target(10 * 1001 * 4);
  const ReadItem box = tensors_[1].box_item(0, file_.records[1], {100, 0}, {10, 1001}, target.data());
  for (uint64_t at = table; at < file_.bytes; at += 3) {
    flip(at);
    std::memset(target.data(), 0, target.size());
    ASSERT_EQ(damaged({box}), Error::kNoItem) << at - table;
    ASSERT_TRUE(target.text() == tensors_[1].box({100, 0}, {10, 1001}).text());
    mend(at);
  }
  flip(table);
  flip(body(1) + 2'000'000);  // far from the box: but now all of the record is read
  EXPECT_EQ(damaged({box}), 0);
}

TEST_F(Damage, ByTruncationIsNamed) {
  for (size_t which = 0; which < tensors_.size(); ++which) {
    const auto [offset, length, crc] = file_.records[which];
    for (const uint64_t size : {offset, offset + 100, offset + length / 2, offset + length - 1}) {
      std::filesystem::resize_file(file_.path, size);
      for (size_t other = 0; other < tensors_.size(); ++other) {
        Error error = Error::invalid("none");
        ASSERT_EQ(damaged({items()[other]}, &error), other < which ? Error::kNoItem : 0) << size;
        if (other >= which) {
          EXPECT_NE(std::string(error.what()).find("truncated"), std::string::npos) << error.what();
        }
      }
      ASSERT_EQ(damaged(items()), static_cast<int64_t>(which)) << size;
      write_file(file_.path, content_);
    }
  }
  std::filesystem::resize_file(file_.path, 0);
  EXPECT_EQ(damaged(items()), 0);
}

TEST_F(Damage, OfManyRecordsNamesOneOfThem) {
  flip(body(0));
  flip(body(2));
  const int64_t item = damaged(items());
  EXPECT_TRUE(item == 0 || item == 2) << item;
}

// A sound record, but not the one that was saved here: as by a file of another save under the same name.
TEST_F(Damage, ByExchangeIsFoundWhereTheChecksumIsKnown) {
  std::vector<ReadItem> rows = items();
  for (size_t i = 0; i < rows.size(); ++i) rows[i].crc = file_.records[i].crc;
  EXPECT_EQ(damaged(rows), Error::kNoItem);
  const Memory target(10 * 1001 * 4);
  rows.push_back(tensors_[1].box_item(0, file_.records[1], {100, 0}, {10, 1001}, target.data()));
  rows.back().crc = file_.records[1].crc;
  for (const ReadItem& row : rows) {
    ReadItem other = row;
    EXPECT_EQ(damaged({other}), Error::kNoItem);
    other.crc ^= 1;
    EXPECT_EQ(damaged({other}), 0);
  }

  // Also by one that was written without checksums.
  const WrittenFile unchecked = write_data_file(path("unchecked"), sources_of(tensors_), kOptions, false);
  std::filesystem::rename(unchecked.path, file_.path);
  for (const ReadItem& row : rows) {
    ReadItem other = row;
    EXPECT_EQ(damaged({other}), Error::kNoItem);
    other.crc ^= 1;
    EXPECT_EQ(damaged({other}), 0) << "written without checksums";
  }
}

// Rows that do not fit the file: an error, or left to the caller, or right by luck, but never wrong bytes.
TEST_F(Damage, OfTheMetadataIsSurvived) {
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
TEST_F(Damage, OfADtypeIsSeenInPartsToo) {
  const Tensor claimed("int32", {700, 1001});
  ASSERT_EQ(claimed.source().framing->total_bytes(), file_.records[1].length);
  const Memory target(claimed.memory.size());
  EXPECT_EQ(damaged({claimed.item(0, file_.records[1], target.data())}), 0) << "whole";
  EXPECT_EQ(damaged({claimed.box_item(0, file_.records[1], {5, 0}, {10, 1001}, target.data())}), 0) << "part";
}

// Two rows may claim overlapping ranges. The true one must not suffer.
TEST_F(Damage, ByOverlappingRowsIsSeen) {
  const Tensor claimed("uint8", {0});
  const write::PlacedRecord inside{file_.records[0].offset + 64, claimed.source().framing->total_bytes(), 0};
  const Tensor large("float32", {1000});
  const WrittenFile other = write_data_file(path("other"), {large.source()}, kOptions);
  const Memory target(large.memory.size());
  for (const bool verify : {true, false}) {
    std::memset(target.data(), 0, target.size());
    scribble_slots(kOptions);
    const std::vector<ReadItem> rows = {large.item(0, other.records[0], target.data()),
                                        claimed.item(0, inside, target.data())};
    EXPECT_NO_THROW({
      const auto report = read_items(other.path, rows, kOptions, verify);
      EXPECT_EQ(report->unread, std::vector<uint32_t>{1});
    });
    EXPECT_TRUE(target.text() == large.memory.text()) << (verify ? "verified" : "not verified");
  }
}

TEST_F(Damage, RowsThatDisagreeAreRefused) {
  std::vector<ReadItem> rows = items();
  rows.push_back(rows[0]);
  rows.back().record_length += 1;
  try {
    read_items(file_.path, rows, kOptions);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind, Error::Kind::invalid);
    EXPECT_EQ(error.item, 3);
  }
}

}  // namespace
}  // namespace vescale_ckpt::read
