#include "format/torch_record.h"

#include <gtest/gtest.h>

#include <bit>
#include <limits>
#include <set>

#include "base/crc32.h"
#include "base/error.h"
#include "format/golden.h"

namespace vescale_ckpt::format {
namespace {

std::string epilogue(const TensorRecord& record, uint32_t crc) {
  std::string bytes(record.epilogue_bytes(), '\xEE');
  record.write_epilogue(crc, reinterpret_cast<std::byte*>(bytes.data()));
  return bytes;
}

// Of so many zeros: doubling a run of zeros doubles it in the checksum.
uint32_t crc_of_zeros(uint64_t count) {
  uint32_t run = crc32(0, "", 1), total = 0;
  for (uint64_t bit = 1; bit != 0 && bit <= count; bit <<= 1) {
    if (count & bit) total = crc32_combine(total, run, bit);
    run = crc32_combine(run, run, bit);
  }
  return total;
}

// All bytes of torch's epilogue but the serialization id and the id's checksum, which are torch's own.
void expect_same_but_id(const std::string& ours, const std::string& golden) {
  ASSERT_EQ(ours.size(), golden.size());
  EXPECT_EQ(golden.find("serialization_id"), ours.find("serialization_id"));
  size_t differing = 0;
  for (size_t at = 0; at < ours.size(); ++at) differing += ours[at] != golden[at];
  EXPECT_LE(differing, 40u + 4 + 4);
}

TEST(TorchRecord, IsWhatTorchSaves) {
  for (const GoldenTensor& tensor : golden_tensors()) {
    SCOPED_TRACE(tensor.name);
    const std::string bytes = golden(tensor.name);
    const TensorRecord record = tensor.record();
    ASSERT_EQ(record.total_bytes(), bytes.size());
    EXPECT_EQ(record.prologue(), bytes.substr(0, record.prologue().size()));
    const std::string body = bytes.substr(record.prologue().size(), record.body_bytes());
    const std::string end = bytes.substr(record.prologue().size() + record.body_bytes());
    const uint32_t crc = crc32(0, body.data(), body.size());
    EXPECT_TRUE(record.epilogue_matches(crc, view(end)));
    EXPECT_EQ(record.claimed_crc(view(end)), crc);
    expect_same_but_id(epilogue(record, crc), end);
    EXPECT_EQ(record.pickle(), std::string(reinterpret_cast<const char*>(find_body(view(bytes), "/data.pkl")->data()),
                                           record.pickle().size()));
  }
}

TEST(TorchRecord, IsWhatTorchSavesAroundFourGiB) {
  const std::pair<const char*, uint64_t> cases[] = {{"zeros_70000", 70000},
                                                    {"zeros_below_4gib", (uint64_t{1} << 32) - 2},
                                                    {"zeros_4gib", (uint64_t{1} << 32) - 1},
                                                    {"zeros_over_4gib", (uint64_t{1} << 32) + 5}};
  for (const auto& [name, count] : cases) {
    SCOPED_TRACE(name);
    const std::string framing = golden(name);
    const Sizes sizes{static_cast<int64_t>(count)};
    const TensorRecord record(dtypes()[dtype_code("uint8")], sizes);
    ASSERT_EQ(record.prologue().size() + record.epilogue_bytes(), framing.size());
    EXPECT_EQ(record.prologue(), framing.substr(0, record.prologue().size()));
    const std::string end = framing.substr(record.prologue().size());
    const uint32_t crc = crc_of_zeros(count);
    EXPECT_TRUE(record.epilogue_matches(crc, view(end)));
    expect_same_but_id(epilogue(record, crc), end);
  }
}

TEST(TorchRecord, OfEveryDtypeIsAWholeArchive) {
  for (const DType& dtype : dtypes()) {
    for (const Sizes& sizes : {Sizes{}, Sizes{3}, Sizes{0}, Sizes{2, 3}, Sizes{2, 0, 3}, Sizes{1, 2, 3, 4, 5}}) {
      const TensorRecord record(dtype, sizes);
      std::string body(record.body_bytes(), '\0');
      fill_random({reinterpret_cast<std::byte*>(body.data()), body.size()}, 1);
      const std::string end = epilogue(record, crc32(0, body.data(), body.size()));
      const std::string bytes = record.prologue() + body + end;
      ASSERT_EQ(check_archive(view(bytes)), "") << dtype.name;
      ASSERT_EQ(bytes.size(), record.total_bytes());
      const auto found = find_body(view(bytes), "/data/0");
      ASSERT_TRUE(found);
      ASSERT_EQ(found->size(), body.size());
      ASSERT_EQ(static_cast<size_t>(found->data() - view(bytes).data()), record.prologue().size());
      ASSERT_EQ(record.prologue().size() % 64, 0u);
      const auto pickle = find_body(view(bytes), "/data.pkl");
      ASSERT_TRUE(pickle);
      ASSERT_EQ(std::string(reinterpret_cast<const char*>(pickle->data()), pickle->size()), record.pickle());
    }
  }
}

TEST(TorchRecord, SeesEveryChangedBitOfAnEpilogue) {
  const TensorRecord record = golden_tensors()[0].record();
  const std::string good = epilogue(record, 0x12345678);
  ASSERT_TRUE(record.epilogue_matches(0x12345678, view(good)));
  EXPECT_FALSE(record.epilogue_matches(0x12345679, view(good)));
  EXPECT_EQ(record.claimed_crc(view(good)), 0x12345678u);
  for (size_t at = 0; at < good.size(); ++at) {
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ (1 << (at % 8)));
    ASSERT_FALSE(record.epilogue_matches(0x12345678, view(bad))) << at;
  }
  EXPECT_FALSE(record.epilogue_matches(0x12345678, view(good.substr(1))));
  EXPECT_FALSE(record.epilogue_matches(0x12345678, view(good + "x")));
}

TEST(TorchRecord, OfNothingHasNoChecksum) {
  const TensorRecord record = golden_tensors()[3].record();
  EXPECT_EQ(record.body_bytes(), 0u);
  EXPECT_EQ(record.claimed_crc(view(epilogue(record, 0))), 0u);
}

TEST(TensorBytes, RefusesWhatCannotBe) {
  const DType& float32 = dtypes()[dtype_code("float32")];
  constexpr int64_t kHuge = int64_t{1} << 31, kMost = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(tensor_bytes(float32, Sizes{}), 4u);
  EXPECT_EQ(tensor_bytes(float32, Sizes{5, 0, 7}), 0u);
  EXPECT_EQ(tensor_bytes(float32, Sizes{kHuge, 1 << 20}), uint64_t{1} << 53);
  EXPECT_THROW(tensor_bytes(float32, Sizes{-1}), Error);
  EXPECT_THROW(tensor_bytes(float32, Sizes{0, -1}), Error);
  EXPECT_THROW(tensor_bytes(float32, Sizes{kHuge, kHuge}), Error);
  EXPECT_THROW(tensor_bytes(float32, Sizes{kMost, kMost, kMost}), Error);
  EXPECT_THROW(tensor_bytes(float32, Sizes{0, kMost, kMost}), Error);
}

TEST(DTypes, AreDistinct) {
  std::set<std::string_view> names, storages;
  for (const DType& dtype : dtypes()) {
    EXPECT_TRUE(names.insert(dtype.name).second) << dtype.name;
    EXPECT_TRUE(dtype.storage.empty() || storages.insert(dtype.storage).second) << dtype.storage;
    EXPECT_TRUE(std::has_single_bit(dtype.item_bytes)) << dtype.name;
  }
}

TEST(RecordCacheTest, BuildsEachOnce) {
  RecordCache cache;
  const auto one = cache.get(0, Sizes{2, 3});
  EXPECT_EQ(cache.get(0, Sizes{2, 3}), one);
  EXPECT_NE(cache.get(1, Sizes{2, 3}), one);
  EXPECT_NE(cache.get(0, Sizes{3, 2}), one);
  EXPECT_NE(cache.get(0, Sizes{2, 3, 1}), one);
  EXPECT_NE(cache.get(0, Sizes{}), cache.get(1, Sizes{}));
  EXPECT_THROW(cache.get(static_cast<uint32_t>(dtypes().size()), Sizes{}), Error);
}

TEST(ObjectRecord, IsWhatTorchSaves) {
  const std::string bytes = golden("object");
  const auto pickle = find_body(view(bytes), "/data.pkl");
  ASSERT_TRUE(pickle);
  const std::string ours = object_record({reinterpret_cast<const char*>(pickle->data()), pickle->size()});
  EXPECT_EQ(check_archive(view(ours)), "");
  const size_t id = bytes.find(".data/serialization_id");
  EXPECT_EQ(ours.substr(0, id), bytes.substr(0, id));
  expect_same_but_id(ours.substr(id), bytes.substr(id));
}

}  // namespace
}  // namespace vescale_ckpt::format
