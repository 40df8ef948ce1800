#include "format/torch_record.h"

#include <gtest/gtest.h>

#include <bit>
#include <limits>
#include <set>

#include "base/crc32.h"
#include "base/error.h"
#include "format/archive.h"
#include "format/golden.h"
#include "tensors.h"

namespace vescale_ckpt::format {
namespace {

std::string epilogue(const TensorRecord& record, uint32_t crc) {
  std::string bytes(record.epilogue_bytes(), '\xEE');
  record.write_epilogue(crc, reinterpret_cast<std::byte*>(bytes.data()));
  return bytes;
}

TensorRecord record_of(std::string_view dtype, const Sizes& sizes) {
  return TensorRecord(dtypes()[dtype_code(dtype)], sizes);
}

// That ours are torch's in every byte, tests/dcp/test_differential.py tells.
TEST(TorchRecord, KnowsThoseOfTorch) {
  const std::string bytes = golden("float32_2x3");
  const TensorRecord record = record_of("float32", {2, 3});
  const size_t begin = record.prologue().size(), end = begin + record.body_bytes();
  EXPECT_EQ(record.prologue(), bytes.substr(0, begin));
  const uint32_t crc = crc32(0, bytes.data() + begin, end - begin);
  EXPECT_TRUE(record.epilogue_matches(crc, view(bytes).subspan(end)));
  EXPECT_EQ(record.claimed_crc(view(bytes).subspan(end)), crc);
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
      const auto found = body_of(view(bytes), "/data/0");
      ASSERT_EQ(found.size(), body.size());
      ASSERT_EQ(static_cast<size_t>(found.data() - view(bytes).data()), record.prologue().size());
      ASSERT_EQ(record.prologue().size() % 64, 0u);
      const auto pickle = body_of(view(bytes), "/data.pkl");
      ASSERT_EQ(std::string(reinterpret_cast<const char*>(pickle.data()), pickle.size()), record.pickle());
    }
  }
}

TEST(TorchRecord, SeesEveryChangedBitOfAnEpilogue) {
  const TensorRecord record = record_of("float32", {2, 3});
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
  const TensorRecord record = record_of("int64", {0, 4});
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

}  // namespace
}  // namespace vescale_ckpt::format
