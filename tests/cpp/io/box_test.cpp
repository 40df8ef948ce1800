#include "io/box.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "error_of.h"
#include "tensors.h"

namespace vescale_ckpt::io {
namespace {

using Range = std::pair<uint64_t, uint64_t>;

// A random box over random memory, and what Box should make of it, found element by element.
struct Case {
  uint32_t item;  // bytes
  Sizes chunk, offsets, sizes, strides;
  uint64_t body_bytes = 0;
  uint64_t memory_bytes = 0;
  uint64_t origin = 0;  // of the box's first element in the memory
  struct Element {
    uint64_t body;    // byte offset in the body
    uint64_t memory;  // byte offset in the memory
  };
  std::vector<Element> elements;  // in row-major order

  Box box() const { return Box(item, chunk, offsets, sizes, strides); }

  std::string text() const {
    std::string text = "item " + std::to_string(item);
    for (size_t dim = 0; dim < chunk.size(); ++dim) {
      text += " [" + std::to_string(offsets[dim]) + "+" + std::to_string(sizes[dim]) + " of " +
              std::to_string(chunk[dim]) + ", stride " + std::to_string(strides[dim]) + "]";
    }
    return text;
  }
};

enum class Strides { distinct, any };  // distinct: no two elements share memory; any: zeros too

int64_t pick(std::mt19937& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}

Case random_case(std::mt19937& random, Strides kind) {
  constexpr uint32_t kItems[] = {1, 2, 3, 4, 8, 12, 16};
  Case c;
  c.item = kItems[pick(random, 0, 6)];
  const size_t dims = static_cast<size_t>(pick(random, 0, 4));
  const int64_t largest = dims <= 2 ? 9 : 5;
  for (size_t dim = 0; dim < dims; ++dim) {
    const int64_t limit = pick(random, pick(random, 0, 9) == 0 ? 0 : 1, largest);
    int64_t size = pick(random, 0, 2) == 0 ? limit : pick(random, limit == 0 ? 0 : 1, limit);
    if (pick(random, 0, 30) == 0) size = 0;
    c.chunk.push_back(limit);
    c.sizes.push_back(size);
    c.offsets.push_back(pick(random, 0, limit - size));
  }

  // Strides: dimensions in a random order, each wide enough for those before it, some turned around.
  c.strides.assign(dims, 0);
  std::vector<size_t> order(dims);
  for (size_t dim = 0; dim < dims; ++dim) order[dim] = dims - 1 - dim;
  if (pick(random, 0, 1) == 0) std::shuffle(order.begin(), order.end(), random);
  const bool gaps = pick(random, 0, 1) == 0, signs = pick(random, 0, 1) == 0;
  int64_t stride = 1, low = 0, high = 0;  // the extent of the memory in elements
  for (const size_t dim : order) {
    stride += gaps ? pick(random, 0, 2) : 0;
    c.strides[dim] = signs && pick(random, 0, 1) == 0 ? -stride : stride;
    if (kind == Strides::any && pick(random, 0, 2) == 0) c.strides[dim] = 0;
    stride *= std::max<int64_t>(1, c.sizes[dim]);
    if (c.sizes[dim] > 0) (c.strides[dim] < 0 ? low : high) += (c.sizes[dim] - 1) * c.strides[dim];
  }
  c.origin = static_cast<uint64_t>(-low) * c.item;
  c.memory_bytes = static_cast<uint64_t>(high - low + 1) * c.item;

  c.body_bytes = c.item;
  for (const int64_t limit : c.chunk) c.body_bytes *= static_cast<uint64_t>(limit);
  if (std::find(c.sizes.begin(), c.sizes.end(), 0) != c.sizes.end()) return c;
  for (Sizes index(dims, 0);;) {
    int64_t body = 0, memory = 0;
    for (size_t dim = 0; dim < dims; ++dim) {
      body = body * c.chunk[dim] + c.offsets[dim] + index[dim];
      memory += index[dim] * c.strides[dim];
    }
    c.elements.push_back({static_cast<uint64_t>(body) * c.item,
                          static_cast<uint64_t>(static_cast<int64_t>(c.origin) + memory * c.item)});
    size_t dim = dims;
    while (dim > 0 && ++index[dim - 1] == c.sizes[dim - 1]) index[--dim] = 0;
    if (dim == 0) return c;
  }
}

std::vector<std::byte> numbered(uint64_t bytes) {
  std::vector<std::byte> data(bytes);
  for (uint64_t at = 0; at < bytes; ++at) data[at] = static_cast<std::byte>(at * 131 + at / 256 + 1);
  return data;
}

// A range of the body that may start and end anywhere, also inside an element.
Range random_cut(std::mt19937& random, uint64_t bytes) {
  const auto last = static_cast<int64_t>(bytes);
  const int64_t a = pick(random, 0, last), b = pick(random, 0, last);
  return pick(random, 0, 3) == 0 ? Range{0, bytes} : Range{std::min(a, b), std::max(a, b)};
}

constexpr int kCases = 2000;

TEST(Box, ScattersLikeElementByElement) {
  std::mt19937 random(1);
  for (int round = 0; round < kCases; ++round) {
    const Case c = random_case(random, Strides::distinct);
    const auto [begin, end] = random_cut(random, c.body_bytes);
    const std::vector<std::byte> body = numbered(c.body_bytes);
    const std::vector<std::byte> cut(body.begin() + static_cast<int64_t>(begin),
                                     body.begin() + static_cast<int64_t>(end));

    std::vector<std::byte> memory(c.memory_bytes, std::byte{0xAA}), expected = memory;
    for (const auto& [from, to] : c.elements) {
      for (uint64_t at = 0; at < c.item; ++at) {
        if (from + at >= begin && from + at < end) expected[to + at] = body[from + at];
      }
    }
    c.box().scatter(cut.data(), begin, end, memory.data() + c.origin);
    ASSERT_EQ(memory, expected) << c.text() << " cut " << begin << ".." << end;
  }
}

TEST(Box, GathersLikeElementByElement) {
  std::mt19937 random(2);
  for (int round = 0; round < kCases; ++round) {
    const Case c = random_case(random, Strides::any);
    const auto [begin, end] = random_cut(random, c.body_bytes);
    const std::vector<std::byte> memory = numbered(c.memory_bytes);

    std::vector<std::byte> cut(end - begin, std::byte{0xEE}), expected = cut;
    for (const auto& [to, from] : c.elements) {
      for (uint64_t at = 0; at < c.item; ++at) {
        if (to + at >= begin && to + at < end) expected[to + at - begin] = memory[from + at];
      }
    }
    c.box().gather(cut.data(), begin, end, memory.data() + c.origin);
    ASSERT_EQ(cut, expected) << c.text() << " cut " << begin << ".." << end;
  }
}

TEST(Box, RangesCoverTheBoxAndCloseSmallGapsOnly) {
  std::mt19937 random(4);
  for (int round = 0; round < kCases; ++round) {
    const Case c = random_case(random, Strides::any);
    const auto gap = static_cast<uint64_t>(pick(random, 0, 3) == 0 ? 0 : pick(random, 0, 60));
    std::vector<Range> expected;
    for (const auto& [body, memory] : c.elements) {
      if (!expected.empty() && body - expected.back().second <= gap) {
        expected.back().second = body + c.item;
      } else {
        expected.emplace_back(body, body + c.item);
      }
    }
    std::vector<Range> found;
    c.box().ranges(gap, [&](uint64_t begin, uint64_t end) { found.emplace_back(begin, end); });
    ASSERT_EQ(found, expected) << c.text() << " gap " << gap;
  }
}

TEST(Box, KnowsItsMeasures) {
  std::mt19937 random(5);
  for (int round = 0; round < kCases; ++round) {
    const Case c = random_case(random, Strides::any);
    const Box box = c.box();
    ASSERT_EQ(box.bytes(), c.elements.size() * c.item) << c.text();
    ASSERT_EQ(box.whole(), c.sizes == c.chunk) << c.text();
    ASSERT_EQ(box.end() - box.begin(),
              c.elements.empty() ? 0 : c.elements.back().body + c.item - c.elements.front().body)
        << c.text();
    ASSERT_EQ(box.begin(), c.elements.empty() ? box.begin() : c.elements.front().body) << c.text();
    bool dense = true;
    for (size_t i = 1; i < c.elements.size(); ++i) {
      const auto &one = c.elements[i - 1], &next = c.elements[i];
      dense = dense && next.body == one.body + c.item && next.memory == one.memory + c.item;
    }
    ASSERT_EQ(box.dense(), dense) << c.text();
  }
}

TEST(Box, RefusesToLeaveItsChunk) {
  const auto make = [](int64_t limit, int64_t offset, int64_t size) {
    const Sizes chunk{3, limit}, offsets{0, offset}, sizes{3, size}, strides{1, 1};
    return Box(4, chunk, offsets, sizes, strides);
  };
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  EXPECT_NO_THROW(make(5, 2, 3));
  EXPECT_NO_THROW(make(5, 5, 0));
  EXPECT_THROW(make(5, 3, 3), Error);
  EXPECT_THROW(make(5, 6, 0), Error);
  EXPECT_THROW(make(5, -1, 2), Error);
  EXPECT_THROW(make(5, 1, -2), Error);
  EXPECT_THROW(make(-1, 0, 0), Error);
  EXPECT_THROW(make(5, kMost, kMost), Error);
  const Error error = error_of([&] { make(5, 3, 3); });
  EXPECT_EQ(error.kind, Error::Kind::invalid);
  EXPECT_NE(std::string(error.what()).find("dimension 1"), std::string::npos) << error.what();
}

// torch keeps any stride for a dimension of one element: it is never used.
TEST(Box, IgnoresTheStrideOfOneElement) {
  const Sizes chunk{1, 3}, offsets{0, 0}, sizes{1, 3}, strides{std::numeric_limits<int64_t>::max() / 2, 1};
  const Box box(8, chunk, offsets, sizes, strides);
  EXPECT_TRUE(box.dense());
  EXPECT_EQ(box.bytes(), 24u);
}

// Of a dtype, sizes and a box, into memory of its own that is laid out with the dimensions in reverse.
struct Copy {
  Tensor piece;
  Sizes offsets, sizes;
  Memory target;

  Copy(std::string_view dtype, Sizes shape, Sizes box_offsets, Sizes box_sizes, uint64_t seed)
      : piece(dtype, std::move(shape), kTorchPlace, seed),
        offsets(std::move(box_offsets)),
        sizes(std::move(box_sizes)),
        target(format::tensor_bytes(format::dtypes()[piece.dtype], sizes)) {}

  Sizes strides() const {
    Sizes reversed(sizes.rbegin(), sizes.rend()), result = row_major(reversed);
    return {result.rbegin(), result.rend()};
  }

  void add_to(std::vector<int64_t>& table) const {
    table.insert(table.end(), {piece.dtype, address(piece.memory), std::ssize(sizes)});
    for (const Sizes& list : {piece.sizes, offsets, sizes}) table.insert(table.end(), list.begin(), list.end());
    table.push_back(address(target));
    const Sizes at = strides();
    table.insert(table.end(), at.begin(), at.end());
  }

  void expect_done() const {
    const Memory wanted = piece.box(offsets, sizes);
    const Sizes zeros(sizes.size(), 0);
    Memory found(wanted.size());
    const Box box(format::dtypes()[piece.dtype].item_bytes, sizes, zeros, sizes, strides());
    box.gather(found.data(), 0, found.size(), target.data());
    EXPECT_EQ(found.text(), wanted.text());
  }
};

TEST(BoxCopy, SmallAndLargeOnesOnSeveralThreads) {
  std::mt19937 random(1);
  for (const unsigned threads : {1u, 4u}) {
    std::vector<Copy> copies;
    copies.emplace_back("float32", Sizes{1300, 900}, Sizes{1, 0}, Sizes{1290, 899}, 1);  // many steps, cut inside rows
    copies.emplace_back("uint8", Sizes{3 << 20}, Sizes{5}, Sizes{(2 << 20) + 7}, 2);
    for (int64_t i = 0; i < 200; ++i) {
      const int64_t rows = 1 + i % 7;
      copies.emplace_back("int16", Sizes{rows + 1, 9}, Sizes{1, i % 9}, Sizes{rows, 9 - i % 9}, i);
    }
    copies.emplace_back("float64", Sizes{}, Sizes{}, Sizes{}, 3);
    copies.emplace_back("float64", Sizes{0, 3}, Sizes{0, 1}, Sizes{0, 2}, 4);
    std::vector<int64_t> table;
    for (const Copy& copy : copies) copy.add_to(table);
    copy_boxes(parse_copy_table(table), threads);
    for (const Copy& copy : copies) copy.expect_done();
  }
  copy_boxes({}, 4);
}

TEST(BoxCopy, TheTableNamesTheRowThatMakesNoSense) {
  const std::vector<int64_t> good = {0, 0, 1, 5, 1, 3, 0, 1};
  EXPECT_EQ(parse_copy_table(good).size(), 1u);
  for (const auto& [at, value] :
       std::vector<std::pair<size_t, int64_t>>{{0, 999}, {2, 2}, {4, 3}, {3, -1}, {7, INT64_MAX}}) {
    std::vector<int64_t> table = good;
    table.insert(table.end(), good.begin(), good.end());
    table[good.size() + at] = value;
    if (at == 7) table[good.size()] = dtype_code("int16");
    EXPECT_EQ(row_of_error([&] { parse_copy_table(table); }), 1) << at;
  }
}

}  // namespace
}  // namespace vescale_ckpt::io
