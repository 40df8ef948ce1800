#include "state/inventory.h"

#include <gtest/gtest.h>

#include <cstring>

#include "plan/ranks.h"

namespace vescale_ckpt::state {
namespace {

constexpr size_t kHeader = 6;  // words

// Words, so that they are aligned as memory from Python is.
using Packed = std::vector<int64_t>;

Packed packed(const InventoryBuilder& builder, int64_t node = 0) {
  const std::vector<std::byte> bytes = builder.pack(node);
  Packed words(bytes.size() / 8);
  EXPECT_EQ(bytes.size() % 8, 0u);
  std::memcpy(words.data(), bytes.data(), bytes.size());
  return words;
}

InventoryBuilder sample() {
  InventoryBuilder builder;
  const plan::Dims shape = {6, 4}, offset = {2, 0}, size = {2, 4}, none;
  builder.add({"weight", ItemKind::shard, 3, kRequiresGrad, 16, shape, offset, size});
  builder.add({"step", ItemKind::tensor, 0, 0, 4, none, none, none});
  builder.add({"", ItemKind::object, 0, 0, 77, none, none, none});
  return builder;
}

std::string refusal(std::span<const std::byte> bytes) {
  try {
    const Inventory inventory(bytes);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind, Error::Kind::invalid);
    return error.what();
  }
  return "";
}

std::string refusal(const Packed& words) {
  return refusal(std::as_bytes(std::span(words)));
}

TEST(Inventory, HoldsWhatWasAdded) {
  const Packed words = packed(sample(), 7);
  const Inventory inventory(std::as_bytes(std::span(words)));
  ASSERT_EQ(inventory.size(), 3u);
  EXPECT_EQ(inventory.node(), 7);
  const Item weight = inventory[0], step = inventory[1], object = inventory[2];
  EXPECT_EQ(weight.name, "weight");
  EXPECT_EQ(weight.kind, ItemKind::shard);
  EXPECT_EQ(weight.dtype, 3);
  EXPECT_EQ(weight.flags, kRequiresGrad);
  EXPECT_EQ(weight.bytes, 16u);
  EXPECT_EQ(plan::Dims(weight.shape.begin(), weight.shape.end()), plan::Dims({6, 4}));
  EXPECT_EQ(plan::Dims(weight.offset.begin(), weight.offset.end()), plan::Dims({2, 0}));
  EXPECT_EQ(plan::Dims(weight.size.begin(), weight.size.end()), plan::Dims({2, 4}));
  EXPECT_EQ(step.name, "step");
  EXPECT_EQ(step.kind, ItemKind::tensor);
  EXPECT_TRUE(step.shape.empty());
  EXPECT_EQ(object.name, "");
  EXPECT_EQ(object.kind, ItemKind::object);
  EXPECT_EQ(object.bytes, 77u);
}

TEST(Inventory, MayBeOfNothing) {
  const Packed words = packed(InventoryBuilder());
  EXPECT_EQ(words.size(), kHeader);
  EXPECT_EQ(Inventory(std::as_bytes(std::span(words))).size(), 0u);
}

TEST(Inventory, EqualNamesMakeEqualBlocks) {
  InventoryBuilder other;
  const plan::Dims shape = {9}, offset = {0};
  other.add({"weight", ItemKind::tensor, 3, 0, 18, shape, offset, shape});
  other.add({"step", ItemKind::object, 0, 0, 0, {}, {}, {}});
  other.add({"", ItemKind::object, 0, 0, 0, {}, {}, {}});
  InventoryBuilder joined;  // the same letters, cut elsewhere
  joined.add({"weights", ItemKind::object, 0, 0, 0, {}, {}, {}});
  joined.add({"tep", ItemKind::object, 0, 0, 0, {}, {}, {}});
  joined.add({"", ItemKind::object, 0, 0, 0, {}, {}, {}});
  const Packed a = packed(sample()), b = packed(other), c = packed(joined);
  const auto names = [](const Packed& words) {
    const auto block = Inventory(std::as_bytes(std::span(words))).parts().names;
    return std::string(reinterpret_cast<const char*>(block.data()), block.size());
  };
  EXPECT_EQ(names(a), names(b));
  EXPECT_NE(names(a), names(c));
}

TEST(Inventory, RefusesEveryTruncation) {
  const Packed words = packed(sample());
  const auto bytes = std::as_bytes(std::span(words));
  EXPECT_EQ(refusal(bytes), "");
  for (size_t length = 0; length < bytes.size(); ++length) {
    // A copy of exactly that length, so that a sanitizer sees every read past it.
    std::vector<int64_t> copy((length + 7) / 8);
    if (length > 0) std::memcpy(copy.data(), bytes.data(), length);
    EXPECT_NE(refusal(std::as_bytes(std::span(copy)).first(length)), "") << length;
  }
}

TEST(Inventory, RefusesUnalignedBytes) {
  Packed words = packed(sample());
  const size_t bytes = words.size() * 8;
  words.push_back(0);
  auto* begin = reinterpret_cast<std::byte*>(words.data());
  std::memmove(begin + 4, begin, bytes);
  EXPECT_NE(refusal(std::span<const std::byte>(begin + 4, bytes)), "");
}

TEST(Inventory, RefusesLyingHeaders) {
  const Packed good = packed(sample());
  for (const size_t word : {0u, 1u, 2u, 3u, 4u}) {  // magic, items, rows, words of rows, bytes of names
    for (const int64_t lie : {int64_t{-1}, good[word] + 1, good[word] - 1, good[word] + 8, good[word] - 8,
                              int64_t{1} << 32, INT64_MAX, INT64_MIN, INT64_MAX / 8}) {
      Packed words = good;
      words[word] = lie;
      // A few bytes of names more or less may be padding; what the names say they cannot be.
      if (word == 4 && (lie + 7) / 8 == (good[4] + 7) / 8 && lie >= good[4]) continue;
      EXPECT_NE(refusal(words), "") << word << " " << lie;
    }
  }
}

TEST(Inventory, RefusesLyingRows) {
  const Packed good = packed(sample());
  const auto refused = [&](size_t word, uint64_t value) {
    Packed words = good;
    words[kHeader + word] = static_cast<int64_t>(value);
    return refusal(words);
  };
  const uint64_t head = static_cast<uint64_t>(good[kHeader]);
  EXPECT_NE(refused(0, (head & ~uint64_t{0xFF}) | 3), "");                               // kind
  EXPECT_NE(refused(0, (head & ~uint64_t{0xFF00}) | format::dtypes().size() << 8), "");  // dtype
  for (const uint64_t ndim : {0u, 1u, 3u, 65u, UINT32_MAX}) {
    EXPECT_NE(refused(0, (head & UINT32_MAX) | ndim << 32), "") << ndim;
  }
  EXPECT_NE(refused(1, UINT64_MAX), "");                 // bytes
  EXPECT_NE(refused(10, uint64_t{1} << 32), "");         // an object with dims
  EXPECT_EQ(refused(2, static_cast<uint64_t>(-5)), "");  // shapes are judged where ranks are compared
}

TEST(Inventory, HoldsEqualRowsOnce) {
  InventoryBuilder builder;
  const plan::Dims shape = {8, 4}, offset = {0, 0}, size = {2, 4};
  for (const char* name : {"a", "b", "c", "d"}) {
    builder.add({name, ItemKind::shard, 3, 0, 16, shape, offset, name[0] == 'c' ? shape : size});
  }
  const Packed words = packed(builder);
  EXPECT_EQ(words.size(), kHeader + 2 * 8 + 2 + 2 + 1);  // rows, numbers, ends, names
  const Inventory inventory(std::as_bytes(std::span(words)));
  const auto numbers = inventory.numbers();
  EXPECT_EQ(std::vector(numbers.begin(), numbers.end()), (std::vector<uint32_t>{0, 0, 1, 0}));
  EXPECT_EQ(inventory[3].name, "d");
  EXPECT_EQ(inventory[3].size[0], 2);
  EXPECT_EQ(inventory[2].size[0], 8);
}

TEST(Inventory, TakesRowsOfTheirOwnLength) {
  const Packed words = packed(sample());
  const std::span<const std::byte> rows = Inventory(std::as_bytes(std::span(words))).parts().rows;
  InventoryBuilder builder;
  builder.add("weight", rows.first(64));
  builder.add("step", rows.subspan(64, 16));
  builder.add("", rows.subspan(80));
  EXPECT_EQ(packed(builder), words);
  for (const size_t length : {0u, 4u, 8u, 56u, 72u}) EXPECT_THROW(builder.add("w", rows.first(length)), Error);
}

TEST(Inventory, MayLieInParts) {
  const Packed words = packed(sample(), 7);
  const InventoryParts parts = Inventory(std::as_bytes(std::span(words))).parts();
  EXPECT_EQ(parts.header.size() + parts.rows.size() + parts.numbers.size() + parts.names.size(), words.size() * 8);
  const Inventory inventory(parts);
  EXPECT_EQ(inventory.node(), 7);
  EXPECT_EQ(inventory[0].name, "weight");
  EXPECT_EQ(inventory[2].bytes, 77u);
  const auto shorter = [](std::span<const std::byte> part) { return part.first(part.size() - 8); };
  const auto refused = [](const InventoryParts& changed) { EXPECT_THROW(Inventory{changed}, Error); };
  refused({shorter(parts.header), parts.rows, parts.numbers, parts.names});
  refused({parts.header, shorter(parts.rows), parts.numbers, parts.names});
  refused({parts.header, parts.rows, shorter(parts.numbers), parts.names});
  refused({parts.header, parts.rows, parts.numbers, shorter(parts.names)});
  refused({parts.header, parts.numbers, parts.rows, parts.names});
  refused({parts.header, parts.rows, parts.numbers, {}});
  refused({parts.header});
}

TEST(Inventory, AWordChangedAnywhereIsRefusedOrHarmless) {
  const Packed good = packed(sample());
  for (size_t word = 0; word < good.size(); ++word) {
    for (unsigned bit = 0; bit < 64; ++bit) {
      Packed words = good;
      words[word] ^= int64_t{1} << bit;
      if (!refusal(words).empty()) continue;
      const Inventory inventory(std::as_bytes(std::span(words)));
      for (size_t i = 0; i < inventory.size(); ++i) {  // all within the words: a sanitizer would tell
        const Item item = inventory[i];
        volatile int64_t sum = static_cast<int64_t>(item.name.size());
        for (const char letter : item.name) sum = sum + letter;
        for (const auto dims : {item.shape, item.offset, item.size}) {
          for (const int64_t value : dims) sum = sum ^ value;
        }
      }
    }
  }
}

}  // namespace
}  // namespace vescale_ckpt::state
