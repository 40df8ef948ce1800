#include "io/box_copy.h"

#include <gtest/gtest.h>

#include <random>

#include "tables.h"

namespace vescale_ckpt::io {
namespace {

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
