// The index: what goes in comes out, by name and by box; what is damaged is refused and never crashes.
#include "metadata/index.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <random>
#include <set>
#include <string>

#include "base/crc32.h"
#include "base/error.h"
#include "metadata/catalogs.h"
#include "metadata/load_plan.h"

namespace vescale_ckpt::metadata {
namespace {

Checkpoint example() {
  Checkpoint checkpoint(3);
  checkpoint.object("object").tensor("", {}, "int64").tensor("empty", {0, 4}, "bfloat16");
  checkpoint.tensor("grid", {60, 40}, grid({60, 40}, {6, 8}), "float16", state::kRequiresGrad);
  checkpoint.tensor("rows", {1000}, grid({1000}, {300}));
  checkpoint.tensor("scalar \xf0\x9f\x8d\x93", {}, "bool");
  return checkpoint;
}

// With columns that are formulas, few values, and wide codes.
std::vector<std::byte> of_all_columns() {
  Checkpoint checkpoint = example();
  checkpoint.tensor("far apart", {50}, grid({50}, {50})).tensor("two", {60}, grid({60}, {60}));
  std::mt19937_64 random(3);
  for (auto& table : checkpoint.tables()) {
    for (size_t row = table.size() / 4 - 36; row < table.size() / 4; ++row) {
      table[4 * row + 1] = static_cast<int64_t>(row % 2 ? random() >> 3 : uint64_t{1} << 50);
    }
  }
  return checkpoint.image();
}

// Everything that an index says, as text.
std::string all_of(const Index& index) {
  std::string said = std::string(index.save_id()) + "\n";
  for (uint64_t i = 0; i < index.size(); ++i) {
    const Index::Key key = index.key(i);
    const auto found = index.find(key.name);
    said += std::string(key.name) + (found && found->dims == key.dims ? "" : " is not found") + " " +
            std::string(key.dtype) + " " + std::to_string(key.flags) + " [";
    for (const int64_t dim : key.shape) said += std::to_string(dim) + " ";
    const auto chunk = [&](uint64_t number, const int64_t* box) {
      said += "]\n  ";
      for (size_t dim = 0; dim < 2 * key.shape.size(); ++dim) said += std::to_string(box[dim]) + " ";
      const RecordLocation location = index.location(key, number);
      said += std::string(index.file(location.file)) + " " + std::to_string(location.offset) + " " +
              std::to_string(location.length) + " " + std::to_string(location.crc);
    };
    if (key.kind == state::ItemKind::object) {
      chunk(0, nullptr);
    } else {
      index.overlaps(key, Dims(key.shape.size(), 0), key.shape, chunk);
    }
    said += "\n";
  }
  return said;
}

TEST(RecordLocations, NumberAFileOnceThatSeveralRanksName) {
  const std::vector<int64_t> first = {0, 10, 1, -1, 1, 20, 2, -1}, second = {1, 30, 3, -1, 0, 40, 4, -1};
  const RecordLocations locations({first, second}, {{"own", "of both"}, {"of both", "other"}});
  EXPECT_EQ(locations.files(), (std::vector<std::string>{"own", "of both", "other"}));
  const auto file = [&](uint32_t writer, uint32_t row) { return locations[Catalog::Chunk{0, writer, row}].file; };
  EXPECT_EQ(file(0, 0), 0u);
  EXPECT_EQ(file(0, 1), 1u);
  EXPECT_EQ(file(1, 0), 2u);
  EXPECT_EQ(file(1, 1), 1u);
}

void expect_same(const Index& index, const Checkpoint& checkpoint) {
  ASSERT_EQ(index.size(), checkpoint.catalog.keys.size());
  const RecordLocations locations = checkpoint.locations();
  EXPECT_EQ(index.files(), locations.files().size());
  for (size_t i = 0; i < index.size(); ++i) {
    const Catalog::Key& expected = checkpoint.catalog.keys[i];
    const std::string_view name = checkpoint.catalog.name(expected);
    EXPECT_EQ(index.key(i).name, name);  // in the same order
    const auto key = index.find(name);
    ASSERT_TRUE(key) << name;
    EXPECT_EQ(key->kind, expected.kind);
    EXPECT_EQ(key->flags, expected.flags);
    EXPECT_TRUE(std::ranges::equal(key->shape, checkpoint.catalog.shape(expected)));
    ASSERT_EQ(key->chunks, expected.chunks);
    if (expected.kind != state::ItemKind::object) {
      EXPECT_EQ(key->dtype_code, expected.dtype);
      EXPECT_EQ(key->dtype, format::dtypes()[expected.dtype].name);
    }
    std::set<uint64_t> seen;
    index.overlaps(*key, Dims(expected.ndim, 0), key->shape, [&](uint64_t number, const int64_t* box) {
      seen.insert(number);
      const Catalog::Chunk& chunk = checkpoint.catalog.chunks[expected.first_chunk + number];
      EXPECT_EQ(std::memcmp(box, checkpoint.catalog.offset(expected, chunk).data(), expected.ndim * 16), 0);
    });
    EXPECT_EQ(seen.size(), name == "empty" ? 0 : expected.chunks) << name;
    for (uint64_t number = 0; number < expected.chunks; ++number) {
      const RecordLocation a = index.location(*key, number),
                           b = locations[checkpoint.catalog.chunks[expected.first_chunk + number]];
      EXPECT_EQ(std::tie(a.file, a.offset, a.length, a.crc), std::tie(b.file, b.offset, b.length, b.crc));
    }
  }
}

TEST(Index, GivesBackWhatWentIn) {
  const Checkpoint checkpoint = example();
  const Index index(checkpoint.image("the save"));
  EXPECT_EQ(index.save_id(), "the save");
  expect_same(index, checkpoint);
  EXPECT_FALSE(index.find("gri"));
  EXPECT_FALSE(index.find("grid "));
}

// Numbers of all kinds that columns tell apart: equal, evenly spaced, few, many, small, large.
TEST(Index, GivesBackAnyColumns) {
  std::mt19937_64 random(7);
  const auto below = [&](uint64_t end) { return static_cast<int64_t>(random() % end); };
  for (int round = 0; round < 150; ++round) {
    Checkpoint checkpoint(static_cast<uint32_t>(1 + below(5)));
    for (int key = 0; key < 6; ++key) {
      const Dims shape = {1 + below(400), 1 + below(6)}, parts = {1 + below(static_cast<uint64_t>(shape[0])), 1};
      checkpoint.tensor("key " + std::to_string(key), shape, grid(shape, parts), below(2) ? "int8" : "float64");
      if (below(3) == 0) checkpoint.object("object " + std::to_string(key));
    }
    for (auto& of_rank : checkpoint.files) of_rank.push_back("shared");
    for (auto& table : checkpoint.tables()) {
      for (const size_t column : {0, 1, 2, 3}) {
        const int64_t kind = below(6), base = below(uint64_t{1} << 60), step = below(uint64_t{1} << below(40));
        const int64_t few = 1 + below(20);
        for (size_t row = 0; row < table.size() / 4; ++row) {
          const auto number = static_cast<int64_t>(row);
          const int64_t numbers[] = {base,
                                     base + number * step,
                                     base - number * (step % 1000),
                                     base + below(1000),
                                     base + number % few * step,
                                     below(uint64_t{1} << 62)};
          int64_t& word = table[4 * row + column];
          word = std::max<int64_t>(0, numbers[kind]);
          if (column == 0) word %= 2;
          if (column == 3) word = kind == 0 || (kind == 3 && below(2)) ? -1 : word & 0xFFFFFFFF;
        }
      }
    }
    expect_same(Index(checkpoint.image()), checkpoint);
    if (HasFailure()) FAIL() << "in round " << round;
  }
}

// Layers repeat, and what is even is a formula: 4 bytes a chunk are its checksum.
TEST(Index, LayersThatRepeatTakeTheirChecksumsAndLittleMore) {
  constexpr int kRanks = 500, kLayers = 60;
  Checkpoint checkpoint(kRanks);
  const Dims shape = {4000, 8};
  for (int layer = 0; layer < kLayers; ++layer) {
    checkpoint.tensor("layer " + std::to_string(layer), shape, grid(shape, {kRanks, 1}));
  }
  EXPECT_LT(checkpoint.image().size(), 4 * kRanks * kLayers + 60'000);
}

TEST(Index, ANameThatIsThereTwiceIsRefused) {
  Checkpoint checkpoint;
  checkpoint.object("a").tensor("a", {3});
  EXPECT_THROW(Index(checkpoint.image()), Error);
}

TEST(Index, BelongsToOneMetadataOnly) {
  const Checkpoint checkpoint = example();
  const std::string metadata = checkpoint.metadata();
  uint32_t crc = 0;
  std::memcpy(&crc, metadata.data() + metadata.size() - 4, 4);
  const Index index(checkpoint.image("save", metadata.size() - MetadataTrailer::kBytes, crc));
  const auto trailer_of = [](const std::string& text) {
    return std::span(reinterpret_cast<const std::byte*>(text.data()) + text.size() - 16, 16);
  };
  EXPECT_TRUE(index.matches(trailer_of(metadata), metadata.size()));
  EXPECT_FALSE(index.matches(trailer_of(metadata), metadata.size() + 1));
  EXPECT_FALSE(index.matches(trailer_of(metadata), metadata.size() + (uint64_t{1} << 32)));
  EXPECT_FALSE(index.matches(trailer_of(metadata).subspan(1), metadata.size()));
  EXPECT_FALSE(index.matches({}, 0));
  for (size_t byte = 0; byte < 16; ++byte) {
    std::string other = metadata;
    other[other.size() - 16 + byte] ^= 1;
    EXPECT_FALSE(index.matches(trailer_of(other), other.size())) << byte;
  }
}

TEST(Index, CutAnywhereItIsRefused) {
  const std::vector<std::byte> image = of_all_columns();
  for (size_t length = 0; length < image.size(); length += length < 5000 ? 97 : 509) {
    EXPECT_THROW(Index(std::vector(image.begin(), image.begin() + static_cast<ptrdiff_t>(length))), Error) << length;
  }
  std::vector<std::byte> longer = image;
  longer.push_back({});
  EXPECT_THROW(Index{longer}, Error);
}

TEST(Index, AFlippedByteIsRefused) {
  const std::vector<std::byte> image = example().image();
  for (size_t at = 0; at < image.size(); ++at) {
    std::vector<std::byte> flipped = image;
    flipped[at] = ~image[at];
    try {
      const Index index(flipped);
      ADD_FAILURE() << at;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind, Error::Kind::corrupt);
    }
  }
}

// Keys share what they have, so a few bytes could claim any number of chunks.
TEST(Index, MoreChunksThanTheMetadataHasRoomForAreRefused) {
  Checkpoint checkpoint;
  for (int i = 0; i < 10; ++i) checkpoint.tensor(std::to_string(i), {100}, grid({100}, {100}));
  const auto ends = [&](uint64_t pickle_bytes) { return Index(checkpoint.image("save", pickle_bytes)).file_ends(); };
  EXPECT_EQ(ends(16 * 1000).size(), 2u);
  EXPECT_THROW(ends(16 * 1000 - 1), Error);
  checkpoint.tensor("twice", {}, {BoxOf{}, BoxOf{}});
  EXPECT_THROW(Index(checkpoint.image()), Error);
}

// Checksums are no protection against intent: whatever is in the tables, it is refused or harmless.
void use(const std::vector<std::byte>& image) {
  try {
    const Index index(image);
    const auto wanted = ItemRows()
                            .object("object")
                            .box("grid", {60, 40}, {{5, 5}, {50, 30}}, "float16")
                            .box("rows", {1000}, {{1}, {998}})
                            .pack();
    plan_load(index, state::Inventory(wanted), true);
    all_of(index);
  } catch (const Error&) {
  }
}

// `make fuzz` goes on for as many seconds as VESCALE_CKPT_FUZZ_SECONDS says, under AddressSanitizer.
TEST(Index, FuzzOfHostileBytesIsRefusedOrHarmless) {
  const char* setting = std::getenv("VESCALE_CKPT_FUZZ_SECONDS");
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(setting == nullptr ? 0 : std::stoi(setting));
  const std::vector<std::byte> image = of_all_columns();
  std::mt19937_64 random(11);
  const uint64_t extreme[] = {
      0, 1, 0xFF, 0x7FFFFFFF, 0xFFFFFFFF, INT64_MAX, uint64_t{1} << 63, UINT64_MAX, uint64_t{1} << 61, image.size()};
  for (int round = 0; round < 8000 || std::chrono::steady_clock::now() < end; ++round) {
    std::vector<std::byte> hostile = image;
    const uint64_t changes = round % 2 == 0 ? 1 : 1 + random() % 40;  // mostly the first one is as far as it comes
    for (uint64_t i = 0; i < changes; ++i) {
      const bool in_header = random() % 3 == 0;
      const size_t begin = in_header ? 0 : sizeof(IndexHeader),
                   room = in_header ? sizeof(IndexHeader) : image.size() - begin;
      const uint64_t value = random() % 4 == 0 ? random() : extreme[random() % std::size(extreme)];
      const size_t bytes = size_t{1} << random() % 4;
      std::memcpy(hostile.data() + begin + random() % (room - bytes + 1), &value, bytes);
    }
    seal(hostile);
    use(hostile);  // AddressSanitizer knows where it ends
  }
}

// --- From rows

TEST(Index, OfRowsThatContradictEachOther) {
  const auto refused = [](const ItemRows& rows, size_t count) {
    const std::vector<int64_t> locations(count * RecordLocations::kWords, 0);
    try {
      index_of_rows(state::Inventory(rows.pack()), locations, {"file"});
    } catch (const Error& error) {
      return error.kind == Error::Kind::invalid;
    }
    return false;
  };
  const auto row = [](const Dims& shape, const BoxOf& box, std::string_view dtype = "float32") {
    return ItemRows().box("a", {4}, {{0}, {2}}).box("a", shape, box, dtype);
  };
  EXPECT_FALSE(refused(row({4}, {{2}, {2}}), 2));
  EXPECT_TRUE(refused(row({5}, {{2}, {2}}), 2));
  EXPECT_TRUE(refused(row({4, 1}, {{2, 0}, {2, 1}}), 2));
  EXPECT_TRUE(refused(row({4}, {{2}, {2}}, "int8"), 2));
  EXPECT_TRUE(refused(row({4}, {{2}, {3}}), 2));
  EXPECT_TRUE(refused(row({4}, {{-1}, {1}}), 2));
  EXPECT_TRUE(refused(row({4}, {{2}, {-1}}), 2));
  EXPECT_TRUE(refused(row({4}, {{INT64_MAX}, {INT64_MAX}}), 2));
  EXPECT_TRUE(refused(ItemRows().box("a", {INT64_MAX, 8}, {{0, 0}, {1, 1}}), 1));
  EXPECT_TRUE(refused(ItemRows().box("a", {4}, {{0}, {4}}).object("a"), 2));
  EXPECT_TRUE(refused(ItemRows().object("a").object("a"), 2));
  EXPECT_TRUE(refused(ItemRows().object("a"), 2));  // one location too many
}

}  // namespace
}  // namespace vescale_ckpt::metadata
