// The pickle as bytes: harmless, framed, ended by its checksum, within its bound. What it unpickles to is tested from
// Python (tests/native/test_index.py).
#include "metadata/metadata_pickle.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>

#include "base/crc32.h"
#include "base/error.h"
#include "format/pickle_check.h"
#include "io/commit.h"
#include "metadata/catalogs.h"
#include "metadata/pickle_out.h"
#include "scratch.h"

namespace vescale_ckpt::metadata {
namespace {

class PendingMetadata : public ScratchTest {};

std::span<const std::byte> bytes_of(std::string_view text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

// That our own check lets it pass, and that the trailer fits.
void expect_sound(const std::string& metadata) {
  size_t end = 0;
  EXPECT_EQ(format::check_pickle(bytes_of(metadata), false, &end), "");
  ASSERT_EQ(metadata.size(), end + MetadataTrailer::kBytes);
  uint32_t length = 0, crc = 0;
  std::memcpy(&length, metadata.data() + end + 8, 4);
  std::memcpy(&crc, metadata.data() + end + 12, 4);
  EXPECT_EQ(metadata.substr(end, 8), "VSCKMDT1");
  EXPECT_EQ(length, end);
  EXPECT_EQ(crc, crc32(0, metadata.data(), end));
}

TEST(MetadataPickle, PassesOurCheck) {
  expect_sound(Checkpoint().metadata());
  Checkpoint checkpoint(8);
  checkpoint.object("object").tensor("scalar", {}).tensor("empty", {0, 4}, "int64");
  for (int i = 0; i < 3000; ++i) {
    checkpoint.tensor("key " + std::to_string(i), {64, 3}, grid({64, 3}, {8, 1}), "bfloat16");
  }
  const std::string metadata = checkpoint.metadata();
  expect_sound(metadata);
  EXPECT_LT(metadata.size(), 3000u * 8 * 75);
}

// Which thread made a block makes no difference. Blocks end at 32,768 keys and chunks: about that, several, none.
TEST_F(PendingMetadata, IsTheSameInAFileAsInMemory) {
  KeyPathsBuilder builder;
  builder.name("object", 1);
  builder.text("object");
  const std::string block = builder.pack();
  const KeyPaths paths(std::vector<std::span<const std::byte>>{bytes_of(block)});
  for (const int64_t chunks : {0, 1, 32'766, 32'767, 32'768, 70'000}) {
    for (const int objects : {0, 1, 3}) {
      Checkpoint checkpoint(3);
      for (int i = 0; i < objects; ++i) checkpoint.object(i == 0 ? "object" : "object " + std::to_string(i));
      if (chunks != 0) checkpoint.tensor("tensor", {chunks}, grid({chunks}, {chunks}));
      if (objects > 1) checkpoint.tensor("last", {40'000}, grid({40'000}, {40'000}));
      const std::string in_memory = checkpoint.metadata({bytes_of(block)});
      const RecordLocations where = checkpoint.locations();
      for (const unsigned threads : {1, 2, 8, 64}) {
        io::PendingFile file(directory(), "metadata");
        const WrittenMetadata written =
            write_metadata({checkpoint.catalog, where, paths, "/a/path", "save"}, threads,
                           [&](uint64_t offset, std::span<const std::byte> bytes) { file.write(offset, bytes); });
        EXPECT_EQ(file.size(), written.bytes);
        EXPECT_TRUE(std::ranges::equal(written.trailer, bytes_of(in_memory).last(MetadataTrailer::kBytes)));
        file.commit();
        EXPECT_TRUE(read_file(path("metadata")) == in_memory) << chunks << " chunks, " << objects << " objects";
      }
    }
  }
}

// A thread that waits for its turn does not wait for a block that will never come.
TEST(MetadataPickle, AnErrorInAnyBlockEndsAllThreads) {
  for (const size_t bad : {0, 45, 89}) {
    Checkpoint checkpoint(1);
    for (int i = 0; i < 90; ++i) checkpoint.tensor("key " + std::to_string(i), {1000}, grid({1000}, {1000}));
    checkpoint.tables()[0][4 * (1000 * bad + 500) + 1] = -1;
    EXPECT_THROW(checkpoint.metadata({}, 4), Error);
  }
  const Checkpoint checkpoint = [] {
    Checkpoint many(1);
    for (int i = 0; i < 90; ++i) many.tensor("key " + std::to_string(i), {1000}, grid({1000}, {1000}));
    return many;
  }();
  const RecordLocations where = checkpoint.locations();
  const KeyPaths none(std::vector<std::span<const std::byte>>{});
  for (int stop = 0; stop < 9; ++stop) {
    std::atomic<int> left = stop;
    const auto sink = [&](uint64_t, std::span<const std::byte>) {
      if (left-- == 0) throw Error::invalid("no room");
    };
    EXPECT_THROW(write_metadata({checkpoint.catalog, where, none, "", ""}, 4, sink), Error) << stop;
  }
}

// The check bounds the work that a pickle causes by its length: recalling long names again and again would exceed it.
TEST(MetadataPickle, LongNamesManyChunksAndManyDimensionsPassOurCheck) {
  for (const size_t ndim : {1, 3, 64}) {
    for (const size_t length : {1, 300, 20000}) {
      const size_t chunks = length > 1000 ? 100 : 2000;
      Dims shape(ndim, 1), parts(ndim, 1);
      shape[0] = parts[0] = static_cast<int64_t>(chunks);
      Checkpoint checkpoint(2);
      checkpoint.files[1][0] = std::string(length, 'f');
      checkpoint.tensor(std::string(length, 'x'), shape, grid(shape, parts));
      for (auto& table : checkpoint.tables()) {
        for (size_t at = 0; at < table.size(); at += 4) table[at + 3] = -1;  // the shortest of all
      }
      SCOPED_TRACE(std::to_string(ndim) + " dimensions, names of " + std::to_string(length));
      expect_sound(checkpoint.metadata());
    }
  }
}

// The check counts more for numbers above 32 bits.
TEST(MetadataPickle, WideNumbersThatAreRecalledPassOurCheck) {
  Dims shape(64, 1);
  shape[0] = int64_t{1} << 40;
  Checkpoint checkpoint(1);
  checkpoint.tensor(std::string(223, 'x'), shape, std::vector<BoxOf>(17000, BoxOf{Dims(64, 0), shape}));
  for (size_t at = 0; at < checkpoint.tables()[0].size(); at += 4) checkpoint.tables()[0][at + 3] = -1;
  expect_sound(checkpoint.metadata());
}

TEST(MetadataPickle, PathsOfLongNamesPassOurCheck) {
  Checkpoint checkpoint;
  KeyPathsBuilder builder;
  for (int i = 0; i < 2000; ++i) {
    const std::string name = std::string(500, 'n') + std::to_string(i);
    checkpoint.object(name);
    builder.name(name, 1);
    builder.text(std::string(400, 'p'));
  }
  const std::string block = builder.pack();
  expect_sound(checkpoint.metadata({bytes_of(block)}));
}

// AddressSanitizer sees a bound that is too low.
TEST(MetadataPickle, StaysWithinItsBoundWithNumbersAtTheirLongest) {
  constexpr int64_t kHuge = (int64_t{1} << 62) - 1;
  for (const size_t ndim : {1, 4, 64}) {
    Checkpoint checkpoint(1);
    for (int key = 0; key < 50; ++key) {
      Dims shape(ndim, kHuge);
      std::vector<BoxOf> boxes(40, {Dims(ndim, kHuge), Dims(ndim, kHuge)});
      for (size_t i = 0; i < boxes.size(); ++i) boxes[i].offset[0] -= static_cast<int64_t>(i) + 100 * key;
      checkpoint.tensor(std::to_string(key), shape, boxes);
    }
    for (size_t at = 0; at < checkpoint.tables()[0].size(); at += 4) {
      checkpoint.tables()[0][at + 1] = checkpoint.tables()[0][at + 2] = kHuge;
    }
    expect_sound(checkpoint.metadata());
  }
}

TEST(MetadataPickle, PlacesThatMakeNoSenseAreRefused) {
  const auto refused = [](size_t word, int64_t value) {
    Checkpoint checkpoint(2);
    checkpoint.tensor("a", {4}, grid({4}, {2})).object("b");
    checkpoint.tables()[1][word] = value;
    try {
      checkpoint.metadata();
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("rank 1"), std::string::npos) << error.what();
      return error.kind == Error::Kind::invalid;
    }
    return false;
  };
  EXPECT_TRUE(refused(0, -1));
  EXPECT_TRUE(refused(0, 1));
  EXPECT_TRUE(refused(1, -1));
  EXPECT_TRUE(refused(1, int64_t{1} << 62));
  EXPECT_TRUE(refused(2, -1));
  EXPECT_TRUE(refused(3, -2));
  EXPECT_TRUE(refused(3, int64_t{1} << 32));
  Checkpoint lacking(2);
  lacking.tensor("a", {4}, grid({4}, {2}));
  lacking.tables()[1].clear();
  EXPECT_THROW(lacking.metadata(), Error);
  lacking.tables()[1].resize(3);
  EXPECT_THROW(lacking.metadata(), Error);
}

std::string number(int64_t value) {
  std::vector<std::byte> out(64);
  PickleOut pickle(out.data());
  const uint64_t begin = pickle.written();
  pickle.number(value);
  return {reinterpret_cast<const char*>(out.data()) + begin, pickle.written() - begin};
}

TEST(PickleOut, NumbersAreAsShortAsPicklesHaveThem) {
  using namespace std::string_literals;
  EXPECT_EQ(number(0), "K\0"s);
  EXPECT_EQ(number(255), "K\xff"s);
  EXPECT_EQ(number(256), "M\0\1"s);
  EXPECT_EQ(number(65536), "J\0\0\1\0"s);
  EXPECT_EQ(number(-1), "J\xff\xff\xff\xff"s);
  EXPECT_EQ(number(int64_t{1} << 31), "\x8a\5\0\0\0\x80\0"s);
  EXPECT_EQ(number((int64_t{1} << 39) - 1), "\x8a\5\xff\xff\xff\xff\x7f"s);
  EXPECT_EQ(number(int64_t{1} << 39), "\x8a\6\0\0\0\0\x80\0"s);
  EXPECT_EQ(number(-(int64_t{1} << 39)), "\x8a\5\0\0\0\0\x80"s);
  EXPECT_EQ(number(INT64_MAX), "\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f"s);
  EXPECT_EQ(number(INT64_MIN), "\x8a\x08\0\0\0\0\0\0\0\x80"s);
}

}  // namespace
}  // namespace vescale_ckpt::metadata
