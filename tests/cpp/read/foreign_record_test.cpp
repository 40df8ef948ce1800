// Records that others wrote: torch.save of this version and of older ones, which lay their archive out in another way.
#include <cstring>
#include <random>

#include "base/error.h"
#include "data_files.h"
#include "format/archive.h"
#include "format/golden.h"

namespace vescale_ckpt::read {
namespace {

const io::EngineOptions kTwoThreads = small_options(io::Access::direct, 2);

class ForeignRecords : public ScratchTest {
 protected:
  // A file of these records, at places that nothing is aligned to.
  std::vector<write::PlacedRecord> put(const std::vector<std::string>& records) const {
    std::string content = "a few bytes";
    std::vector<write::PlacedRecord> placed;
    for (const std::string& record : records) {
      placed.push_back({content.size(), record.size(), 0});
      content += record + "more";
    }
    write_file(path("file"), content);
    return placed;
  }

  std::unique_ptr<ReadReport> read(const std::vector<ReadItem>& items, bool verify = true) const {
    return read_items(path("file"), items, kTwoThreads, verify);
  }

  // A tensor's record as older versions of torch wrote it.
  static std::string older(const Tensor& tensor, std::string_view byteorder = "little", bool checksum = true) {
    format::ArchiveWriter archive;
    archive.add("data.pkl", tensor.source().framing->pickle());
    if (!byteorder.empty()) archive.add("byteorder", byteorder);
    archive.begin("data/0", tensor.memory.size());
    const size_t body = archive.bytes().size();
    archive.end(checksum ? crc32(0, tensor.memory.data(), tensor.memory.size()) : 0);
    archive.add("version", "3\n");
    archive.finish();
    std::string bytes = archive.bytes();
    return bytes.insert(body, tensor.memory.text());
  }
};

TEST_F(ForeignRecords, OfTorchAreRead) {
  std::vector<std::string> records;
  for (const format::GoldenTensor& tensor : format::golden_tensors()) records.push_back(format::golden(tensor.name));
  const std::vector<write::PlacedRecord> placed = put(records);
  for (const bool verify : {true, false}) {
    std::vector<Tensor> claimed;
    std::vector<ReadItem> items;
    for (size_t i = 0; i < placed.size(); ++i) {
      claimed.emplace_back(format::golden_tensors()[i].dtype, format::golden_tensors()[i].sizes);
      items.push_back(claimed.back().item(0, placed[i], claimed.back().memory.data()));
    }
    const auto report = read(items, verify);
    EXPECT_TRUE(report->unread.empty());
    EXPECT_EQ(report->unverified_bytes, 0u);
    for (size_t i = 0; i < placed.size(); ++i) {
      const format::TensorRecord record = format::golden_tensors()[i].record();
      EXPECT_EQ(claimed[i].memory.text(), records[i].substr(record.prologue().size(), record.body_bytes()));
    }
  }
}

TEST_F(ForeignRecords, ThatAreNotPlainAreLeftToTheCaller) {
  const std::vector<write::PlacedRecord> placed =
      put({format::golden("transposed_float32_3x2"), format::golden("float32_2x3"),
           format::golden("conjugated_complex64_2"), format::golden("object")});
  const Tensor transposed("float32", {3, 2}), plain("float32", {2, 3}), conjugated("complex64", {2}),
      object("uint8", {9});
  const Memory target(100);
  for (const bool verify : {true, false}) {
    const auto report =
        read({transposed.item(0, placed[0], target.data()), plain.item(0, placed[1], plain.memory.data()),
              conjugated.item(0, placed[2], target.data()), object.item(0, placed[3], target.data())},
             verify);
    EXPECT_EQ(report->unread, (std::vector<uint32_t>{0, 2, 3}));
    EXPECT_EQ(plain.memory.text(), format::golden("float32_2x3").substr(704, 24));
    const auto part = read({transposed.box_item(0, placed[0], {1, 0}, {1, 2}, target.data())}, verify);
    EXPECT_EQ(part->unread, std::vector<uint32_t>{0});
  }
}

TEST_F(ForeignRecords, InOlderLayoutsAreRead) {
  std::vector<Tensor> tensors;
  tensors.emplace_back("float32", Sizes{10, 10});
  tensors.emplace_back("int8", Sizes{3, 1 << 20});
  tensors.emplace_back("int64", Sizes{0, 4});
  tensors.emplace_back("bfloat16", Sizes{});
  std::vector<std::string> records;
  for (const Tensor& tensor : tensors) records.push_back(older(tensor));
  records.push_back(older(tensors[0], ""));  // older still
  tensors.emplace_back("float32", Sizes{10, 10});
  const std::vector<write::PlacedRecord> placed = put(records);
  for (const bool verify : {true, false}) {
    std::vector<Memory> targets;
    std::vector<ReadItem> items;
    for (size_t i = 0; i < tensors.size(); ++i) {
      items.push_back(tensors[i].item(0, placed[i], targets.emplace_back(tensors[i].memory.size()).data()));
    }
    drop_cache(path("file"));
    const auto report = read(items, verify);
    EXPECT_TRUE(report->unread.empty());
    EXPECT_EQ(report->unverified_bytes, 0u);
    for (size_t i = 0; i < tensors.size(); ++i) EXPECT_TRUE(targets[i].text() == tensors[i].memory.text()) << i;

    const Memory box(2 << 18);
    read({tensors[1].box_item(0, placed[1], {1, 5}, {2, 1 << 18}, box.data())}, verify);
    EXPECT_TRUE(box.text() == tensors[1].box({1, 5}, {2, 1 << 18}).text());
  }
}

TEST_F(ForeignRecords, InOlderLayoutsAreChecked) {
  const Tensor tensor("float32", {10, 10});
  const Memory target(400);
  const auto read_one = [&](const std::string& record) {
    return read({tensor.item(0, put({record})[0], target.data())});
  };
  EXPECT_EQ(read_one(older(tensor, "big"))->unread.size(), 1u);
  EXPECT_EQ(read_one(older(Tensor("float32", {5, 20})))->unread.size(), 1u);
  EXPECT_EQ(read_one(older(Tensor("int32", {10, 10})))->unread.size(), 1u);
  EXPECT_EQ(read_one(std::string(700, 'x'))->unread.size(), 1u);
  EXPECT_EQ(read_one("")->unread.size(), 1u);
  EXPECT_EQ(read_one(older(tensor, "little", false))->unverified_bytes, 400u);

  // A bit of every other byte: named, left to the caller, or of no importance.
  const std::string good = older(tensor);
  for (size_t at = 0; at < good.size(); at += 2) {
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ (1 << (at % 8)));
    try {
      if (read_one(bad)->unread.empty()) {
        ASSERT_TRUE(target.text() == tensor.memory.text()) << at;
      }
    } catch (const Error& error) {
      ASSERT_EQ(error.kind, Error::Kind::corrupt) << error.what();
      ASSERT_EQ(error.item, 0);
    }
  }
  std::mt19937 random(1);
  for (int round = 0; round < 300; ++round) {
    std::string bad = good.substr(0, random() % 8 == 0 ? random() % good.size() : good.size());
    for (unsigned changes = random() % 5; changes != 0 && !bad.empty(); --changes) {
      bad[bad.size() - 1 - random() % std::min<size_t>(bad.size(), 400)] = static_cast<char>(random());
    }
    try {
      if (const auto report = read_one(bad); report->unread.empty() && report->unverified_bytes == 0) {
        ASSERT_TRUE(target.text() == tensor.memory.text());
      }
    } catch (const Error& error) {
      ASSERT_EQ(error.kind, Error::Kind::corrupt) << error.what();
    }
  }
}

}  // namespace
}  // namespace vescale_ckpt::read
