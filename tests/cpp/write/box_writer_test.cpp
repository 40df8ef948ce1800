// Files that several writers fill: each only its own bytes, whatever way they take, and checksums of the whole.
#include "write/placed_boxes.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <thread>

#include "base/error.h"
#include "data_files.h"
#include "error_of.h"
#include "tensors.h"

namespace vescale_ckpt::write {
namespace {

using Dims = std::vector<int64_t>;

// A tensor in the file, and the boxes that it is cut into, one for each writer in turn.
struct Whole {
  uint64_t begin;
  Dims shape;
  std::vector<std::pair<Dims, Dims>> boxes;  // offset, size
};

struct Cut {
  const Whole* whole;
  const std::pair<Dims, Dims>* box;
};

std::vector<std::pair<Dims, Dims>> along(const Dims& shape, size_t dim, const std::vector<int64_t>& lengths) {
  std::vector<std::pair<Dims, Dims>> boxes;
  int64_t at = 0;
  for (const int64_t length : lengths) {
    Dims offset(shape.size()), size = shape;
    offset[dim] = at;
    size[dim] = length;
    boxes.emplace_back(offset, size);
    at += length;
  }
  return boxes;
}

class BoxWriterTest : public AccessTest {
 protected:
  static constexpr size_t kWriters = 3;
  static constexpr uint32_t kItem = 4;

  void SetUp() override {
    AccessTest::SetUp();
    if (IsSkipped()) return;
    options_ = small_options(GetParam());
    dtype_ = dtype_code("int32");
    uint64_t at = 64;
    const auto add = [&](const Dims& shape, size_t dim, const std::vector<int64_t>& lengths) {
      wholes_.push_back({at, shape, along(shape, dim, lengths)});
      at += kItem * static_cast<uint64_t>(std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>()));
    };
    add({3, 5}, 0, {1, 2, 0});  // small ones that share blocks
    add({1}, 0, {0, 1, 0});
    add({600, 1001}, 0, {200, 1, 399});           // rows: long, and less than a block
    add({200, 1003}, 1, {400, 3, 600});           // columns: short runs
    add({3, 700'001}, 1, {300'000, 400'001, 0});  // columns: long runs
    add({40, 30, 11}, 1, {7, 20, 3});             // in the middle
    add({0, 4}, 1, {1, 1, 2});
    add({700'000}, 0, {0, 0, 700'000});  // all of one's
    add({7, 3}, 1, {1, 1, 1});
    bytes_ = at;
    content_ = std::make_unique<Memory>(bytes_);
    fill_random(content_->bytes(), 7);
    reset();
  }

  void reset() const { write_file(path("file"), std::string(bytes_, '?')); }

  std::vector<Cut> cuts_of(size_t writer) const {
    std::vector<Cut> cuts;
    for (const Whole& whole : wholes_) cuts.push_back({&whole, &whole.boxes[writer]});
    return cuts;
  }

  // Copies of a writer's boxes, contiguous or with their dimensions the other way round in memory.
  void write(size_t writer, bool turned, std::vector<uint32_t>* blocks) const {
    const std::vector<Cut> cuts = cuts_of(writer);
    std::vector<Memory> memory;
    std::vector<int64_t> table;
    for (const auto& [whole, box] : cuts) {
      const Dims& size = box->second;
      const Dims strides = turned ? column_major(size) : row_major(size);
      const io::Box place(kItem, whole->shape, box->first, size, strides);
      memory.emplace_back(place.bytes(), writer == 0 ? kTorchPlace : 4);
      place.scatter(content_->data() + whole->begin, 0, UINT64_MAX, memory.back().data());
      const uint64_t bytes = format::tensor_bytes(format::dtypes()[dtype_], whole->shape);
      table.insert(table.end(), {0, static_cast<int64_t>(whole->begin), static_cast<int64_t>(bytes), -1,
                                 int64_t{dtype_}, static_cast<int64_t>(size.size())});
      for (const Dims* list : {&whole->shape, &box->first, &size})
        table.insert(table.end(), list->begin(), list->end());
      table.push_back(address(memory.back()));
      table.insert(table.end(), strides.begin(), strides.end());
    }
    BoxWriter out({path("file")}, options_);
    out.write(table);
    const auto found = out.finish(true);
    if (blocks != nullptr) blocks->assign(found.begin(), found.end());
  }

  // What the file is when only some have written.
  std::string expected(const std::vector<size_t>& writers) const {
    Memory file(bytes_);
    std::ranges::fill(file.bytes(), std::byte{'?'});
    for (const size_t writer : writers) {
      for (const auto& [whole, box] : cuts_of(writer)) {
        const Dims strides(whole->shape.size());
        const io::Box place(kItem, whole->shape, box->first, box->second, strides);
        place.ranges(0, [&](uint64_t begin, uint64_t end) {
          std::memcpy(file.data() + whole->begin + begin, content_->data() + whole->begin + begin, end - begin);
        });
      }
    }
    return std::string(file.text());
  }

  io::EngineOptions options_;
  uint32_t dtype_ = 0;
  uint64_t bytes_ = 0;
  std::vector<Whole> wholes_;
  std::unique_ptr<Memory> content_;
};

INSTANTIATE_TEST_SUITE_P(Ways, BoxWriterTest, ::testing::Values(io::Access::direct, io::Access::buffered),
                         access_test_name);

TEST_P(BoxWriterTest, EachWritesItsOwnBytesAndNoOther) {
  for (const bool turned : {false, true}) {
    for (size_t writer = 0; writer < kWriters; ++writer) {
      reset();
      write(writer, turned, nullptr);
      EXPECT_TRUE(read_file(path("file")) == expected({writer})) << writer;
    }
  }
}

TEST_P(BoxWriterTest, AllAtOnceFillTheFileAndPutItsChecksumsTogether) {
  for (const bool turned : {false, true}) {
    reset();
    std::vector<std::vector<uint32_t>> blocks(kWriters);
    {
      std::vector<std::jthread> threads;
      for (size_t writer = 0; writer < kWriters; ++writer) {
        threads.emplace_back([&, writer] { write(writer, turned, &blocks[writer]); });
      }
    }
    EXPECT_TRUE(read_file(path("file")) == expected({0, 1, 2}));

    for (const Whole& whole : wholes_) {
      const Dims origin(whole.shape.size());
      const io::Box all(kItem, whole.shape, origin, whole.shape, origin);
      if (all.bytes() != 0) expect_block_checksums(blocks, content_->text(), whole.begin, whole.begin + all.bytes());
    }
  }
}

TEST_P(BoxWriterTest, SendsOnlyEdgesAndShortPiecesThroughThePageCache) {
  constexpr int64_t kItems = 700'000;
  const Memory large(kItems * kItem), small(3 * kItem);
  BoxWriter writer({path("file")}, options_);
  writer.write(std::vector<int64_t>{0, 64,      kItems * kItem, -1, dtype_, 1, kItems, 0, kItems, address(large), 1,
                                    0, 8 << 20, 3 * kItem,      -1, dtype_, 1, 3,      0, 3,      address(small), 1});
  writer.finish(false);
  EXPECT_EQ(writer.stats().bytes(), (kItems + 3) * kItem);
  EXPECT_GE(writer.stats().by_access[static_cast<size_t>(access())], kItems * kItem - 2 * kBlock);
}

TEST_P(BoxWriterTest, RefusesTablesThatMakeNoSense) {
  const Memory memory(400);
  const auto row = [&](int64_t file, int64_t begin, int64_t bytes, int64_t dtype, Dims numbers) {
    std::vector<int64_t> table = {file, begin, bytes, -1, dtype, 1};
    table.insert(table.end(), numbers.begin(), numbers.end());
    table.insert(table.end(), {address(memory), 1});
    return table;
  };
  const int64_t item = kItem;
  BoxWriter writer({path("file")}, options_);
  for (const std::vector<int64_t>& table : std::vector<std::vector<int64_t>>{
           row(1, 64, 10 * item, dtype_, {10, 2, 3}),
           row(0, -1, 10 * item, dtype_, {10, 2, 3}),
           row(0, 64, 10 * item, 999, {10, 2, 3}),
           row(0, 64, 10 * item, dtype_, {10, 8, 3}),
           row(0, 64, 9 * item, dtype_, {10, 2, 3}),
           row(0, 64, 10 * item, dtype_, {INT64_MAX, 0, 1}),
           {0, 64},
       }) {
    EXPECT_EQ(row_of_error([&] { writer.write(table); }), 0);
  }
  writer.write(row(0, 64, 10 * item, dtype_, {10, 2, 3}));
  EXPECT_EQ(writer.finish(false).size(), PlacedBoxes::kChecksumHead + 1);
}

}  // namespace
}  // namespace vescale_ckpt::write
