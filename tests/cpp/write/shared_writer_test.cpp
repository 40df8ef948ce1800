// Files that several writers fill: each only its own bytes, whatever way they take, and checksums of the whole.
#include "write/shared_writer.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <thread>

#include "access_test.h"
#include "base/error.h"
#include "data_files.h"
#include "tables.h"

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

class SharedWriterTest : public AccessTest {
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

  std::vector<int64_t> targets(const std::vector<Cut>& cuts) const {
    std::vector<int64_t> table;
    for (const auto& [whole, box] : cuts) {
      table.insert(table.end(),
                   {0, static_cast<int64_t>(whole->begin), int64_t{dtype_}, static_cast<int64_t>(whole->shape.size())});
      for (const Dims* dims : {&whole->shape, &box->first, &box->second}) {
        table.insert(table.end(), dims->begin(), dims->end());
      }
    }
    return table;
  }

  // Copies of a writer's boxes, contiguous or with their dimensions the other way round in memory.
  void write(size_t writer, bool turned, std::vector<uint32_t>* blocks, SharedWriter* given = nullptr) const {
    const std::vector<Cut> cuts = cuts_of(writer);
    std::vector<Memory> memory;
    std::vector<int64_t> table, rows;
    for (const auto& [whole, box] : cuts) {
      const Dims& size = box->second;
      Dims strides = row_major(size);
      if (turned) {
        Dims reversed(size.rbegin(), size.rend());
        strides = row_major(reversed);
        std::ranges::reverse(strides);
      }
      const io::Box place(kItem, whole->shape, box->first, size, strides);
      memory.emplace_back(place.bytes(), writer == 0 ? kTorchPlace : 4);
      place.scatter(content_->data() + whole->begin, 0, UINT64_MAX, memory.back().data());
      rows.push_back(static_cast<int64_t>(rows.size()));
      table.insert(table.end(), {int64_t{dtype_}, address(memory.back()), static_cast<int64_t>(size.size())});
      table.insert(table.end(), size.begin(), size.end());
      table.insert(table.end(), strides.begin(), strides.end());
    }
    SharedWriter own({path("file")}, targets(cuts), options_);
    SharedWriter& out = given != nullptr ? *given : own;
    out.write(table, rows);
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

INSTANTIATE_TEST_SUITE_P(Ways, SharedWriterTest, ::testing::ValuesIn(every_access()), access_test_name);

TEST_P(SharedWriterTest, EachWritesItsOwnBytesAndNoOther) {
  for (const bool turned : {false, true}) {
    for (size_t writer = 0; writer < kWriters; ++writer) {
      reset();
      write(writer, turned, nullptr);
      EXPECT_TRUE(read_file(path("file")) == expected({writer})) << writer;
    }
  }
}

TEST_P(SharedWriterTest, AllAtOnceFillTheFileAndPutItsChecksumsTogether) {
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
      const uint64_t begin = whole.begin, end = begin + all.bytes();
      std::vector<uint32_t> sums(format::cells(begin, end));
      for (size_t writer = 0; writer < kWriters; ++writer) {
        size_t at = 0;
        for (const auto& [of, box] : cuts_of(writer)) {
          const io::Box place(kItem, of->shape, box->first, box->second,
                              origin.empty() ? origin : Dims(of->shape.size()));
          const uint64_t from = of->begin + place.begin(), count = format::cells(from, of->begin + place.end());
          for (uint64_t i = 0; of == &whole && i < count; ++i) {
            sums[from / format::kChecksumBlock - begin / format::kChecksumBlock + i] ^= blocks[writer][at + i];
          }
          at += count;
        }
        EXPECT_EQ(at, blocks[writer].size());
      }
      uint64_t at = begin;
      for (const uint32_t sum : sums) {
        const uint64_t next = std::min(end, align_down(at, format::kChecksumBlock) + format::kChecksumBlock);
        EXPECT_EQ(sum, crc32(0, content_->data() + at, next - at)) << at;
        at = next;
      }
    }
  }
}

TEST_P(SharedWriterTest, SendsOnlyEdgesAndShortPiecesThroughThePageCache) {
  constexpr uint64_t kItems = 700'000;
  const std::vector<int64_t> layout = {0, 64,      int64_t{dtype_}, 1, kItems, 0, kItems,  // then one of three numbers
                                       0, 8 << 20, int64_t{dtype_}, 1, 3,      0, 3};
  const Memory large(kItems * kItem), small(3 * kItem);
  SharedWriter writer({path("file")}, layout, options_);
  writer.write(std::vector<int64_t>{dtype_, address(large), 1, kItems, 1, dtype_, address(small), 1, 3, 1},
               std::vector<int64_t>{0, 1});
  writer.finish(false);
  EXPECT_EQ(writer.stats().bytes(), (kItems + 3) * kItem);
  EXPECT_GE(writer.stats().by_access[static_cast<size_t>(access())], kItems * kItem - 2 * kBlock);
}

TEST_P(SharedWriterTest, FailsWithTheErrorOfAnyCall) {
  for (const Call call : {Call::open, Call::write, Call::sync}) {
    const ArmedFault fault(call, ENOSPC, call == Call::write ? 3 : 0, 1000);
    try {
      write(1, false, nullptr);
      FAIL() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind, Error::Kind::full);
      EXPECT_EQ(error.path, path("file"));
    }
  }
  write(1, false, nullptr);
  SharedWriter cancelled({path("file")}, targets(cuts_of(1)), options_);
  cancelled.cancel();
  EXPECT_THROW(write(1, false, nullptr, &cancelled), Error);
}

TEST_P(SharedWriterTest, RefusesTablesThatMakeNoSense) {
  const std::vector<int64_t> fine = {0, 64, int64_t{dtype_}, 1, 10, 2, 3};
  for (const std::vector<int64_t>& table : std::vector<std::vector<int64_t>>{
           {1, 64, int64_t{dtype_}, 1, 10, 2, 3},
           {0, -1, int64_t{dtype_}, 1, 10, 2, 3},
           {0, 64, 999, 1, 10, 2, 3},
           {0, 64, int64_t{dtype_}, 1, 10, 8, 3},
           {0, 64, int64_t{dtype_}, 1, INT64_MAX, 0, 1},
           {0, 64, int64_t{dtype_}, 2, 10, 2, 3},
           {0, 64},
       }) {
    EXPECT_THROW(SharedWriter({path("file")}, table, options_), Error);
  }
  SharedWriter writer({path("file")}, fine, options_);
  const Memory memory(400);
  const std::vector<int64_t> row = {int64_t{dtype_}, address(memory), 1, 3, 1},
                             other = {int64_t{dtype_}, address(memory), 1, 4, 1};
  EXPECT_THROW(writer.write(other, std::vector<int64_t>{0}), Error);
  EXPECT_THROW(writer.write(row, std::vector<int64_t>{1}), Error);
  EXPECT_THROW(writer.write(row, std::vector<int64_t>{}), Error);
  EXPECT_THROW(writer.write(row, std::vector<int64_t>{0, 0}), Error);
  writer.write(row, std::vector<int64_t>{0});
  EXPECT_EQ(writer.finish(false).size(), 1u);
}

}  // namespace
}  // namespace vescale_ckpt::write
