// Load plans: every element once, in the order of the files; what does not fit is told by item.
#include "metadata/load_plan.h"

#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <numeric>
#include <random>

#include "base/error.h"
#include "error_of.h"
#include "metadata/catalogs.h"

namespace vescale_ckpt::metadata {
namespace {

LoadPlan plan(const Checkpoint& checkpoint, const ItemRows& wanted, bool allow_cast = false) {
  const Index index(checkpoint.image());
  return plan_load(index, state::Inventory(wanted.pack()), allow_cast);
}

struct Read {
  int64_t item, file, offset, length, crc, dtype;
  Dims chunk, storage_offset, lengths, dest_offset;
};

std::vector<Read> reads_of(const LoadPlan& plan) {
  std::vector<Read> reads;
  for (size_t at = 0; at < plan.reads.size();) {
    const int64_t* row = plan.reads.data() + at;
    Read read{row[0], row[1], row[2], row[3], row[4], row[5], {}, {}, {}, {}};
    const auto ndim = static_cast<size_t>(row[6]);
    row += 7;
    for (Dims* dims : {&read.chunk, &read.storage_offset, &read.lengths, &read.dest_offset}) {
      dims->assign(row, row + ndim);
      row += ndim;
    }
    at += 7 + 4 * ndim;
    reads.push_back(read);
  }
  return reads;
}

int64_t volume(const Dims& size) {
  return std::accumulate(size.begin(), size.end(), int64_t{1}, std::multiplies<>());
}

// Fills wanted boxes from stored chunks as the plan says, with numbers that say where in the tensor they are from.
void expect_filled(const Dims& shape, const Dims& stored, const Dims& wanted) {
  const auto chunks = grid(shape, stored), boxes = grid(shape, wanted);
  Checkpoint checkpoint(3);
  checkpoint.tensor("t", shape, chunks);
  ItemRows rows;
  for (const BoxOf& box : boxes) rows.box("t", shape, box);
  const LoadPlan found = plan(checkpoint, rows);
  EXPECT_TRUE(found.uncovered.empty());
  std::map<std::pair<int64_t, int64_t>, size_t> chunk_at;  // by file and offset
  for (size_t i = 0; i < chunks.size(); ++i) chunk_at[{i % 3, 1000 * int64_t(i / 3)}] = i;
  std::vector<std::vector<int>> filled;
  for (const BoxOf& box : boxes) filled.emplace_back(volume(box.size));
  std::pair<int64_t, int64_t> last{0, 0};
  for (const Read& read : reads_of(found)) {
    EXPECT_LE(last, (std::pair{read.file, read.offset}));
    last = {read.file, read.offset};
    const auto rank = std::stoi(found.files[read.file].substr(2));
    const BoxOf& chunk = chunks[chunk_at.at({rank, read.offset})];
    const BoxOf& box = boxes[read.item];
    EXPECT_EQ(read.chunk, chunk.size);
    Dims at(shape.size(), 0);
    for (int64_t i = 0; i < volume(read.lengths); ++i) {
      int64_t place = 0;
      for (size_t dim = 0; dim < shape.size(); ++dim) {
        const int64_t from = chunk.offset[dim] + read.storage_offset[dim] + at[dim];
        ASSERT_EQ(from, box.offset[dim] + read.dest_offset[dim] + at[dim]);
        ASSERT_LT(read.storage_offset[dim] + at[dim], chunk.size[dim]);
        ASSERT_LT(read.dest_offset[dim] + at[dim], box.size[dim]);
        place = place * box.size[dim] + read.dest_offset[dim] + at[dim];
      }
      ++filled[read.item][place];
      for (size_t dim = shape.size(); dim-- > 0 && ++at[dim] == read.lengths[dim];) at[dim] = 0;
    }
  }
  for (const auto& box : filled) EXPECT_EQ(std::ranges::count(box, 1), std::ssize(box));
}

TEST(LoadPlan, FillsEveryElementOnce) {
  expect_filled({24}, {5}, {7});
  expect_filled({24, 18}, {5, 1}, {1, 7});
  expect_filled({24, 18}, {5, 3}, {4, 7});
  expect_filled({24, 18}, {24, 1}, {5, 5});
  expect_filled({6, 5, 7}, {2, 5, 3}, {4, 1, 2});
  expect_filled({5}, {8}, {9});  // some empty
  expect_filled({}, {}, {});
}

TEST(LoadPlan, WhatDoesNotFitIsTold) {
  Checkpoint checkpoint(1);
  checkpoint.object("object").tensor("t", {10}).tensor("matrix", {2, 3}).tensor("scalar", {});
  ItemRows wanted;
  wanted.box("no such", {1}, {{0}, {1}}).object("nor such");
  wanted.box("object", {1}, {{0}, {1}}).object("t").box("t", {11}, {{0}, {11}});
  wanted.box("matrix", {3, 2}, {{0, 0}, {3, 2}}).box("scalar", {1}, {{0}, {1}});
  wanted.box("t", {10}, {{0}, {10}}, "bfloat16").box("t", {10}, {{0}, {0}}, "int8").box("t", {10}, {{0}, {10}});
  const auto found = plan(checkpoint, wanted);
  EXPECT_EQ(found.missing, (Dims{0, 1}));
  std::vector<std::string> told;
  for (const auto& one : found.mismatched) {
    told.push_back(std::to_string(one.item) + ": " + one.expected + " / " + one.stored);
  }
  EXPECT_EQ(told, (std::vector<std::string>{"2: a tensor / an object", "3: an object / a tensor",
                                            "4: shape (11,) / shape (10,)", "5: shape (3, 2) / shape (2, 3)",
                                            "6: shape (1,) / shape ()", "7: dtype torch.bfloat16 / dtype torch.float32",
                                            "8: dtype torch.int8 / dtype torch.float32"}));
  ASSERT_EQ(reads_of(found).size(), 1u);
  EXPECT_EQ(reads_of(found)[0].item, 9);

  const auto cast = plan(checkpoint, wanted, true);
  EXPECT_EQ(cast.mismatched.size(), 5u);
  ASSERT_EQ(reads_of(cast).size(), 2u);
  EXPECT_EQ(reads_of(cast)[0].dtype, dtype_code("float32"));  // the stored one
}

TEST(LoadPlan, HolesAndOverlapsAreTold) {
  Checkpoint checkpoint(1);
  checkpoint.tensor("hole", {10}, {{{0}, {4}}, {{6}, {4}}});
  checkpoint.tensor("twice", {10}, {{{0}, {6}}, {{4}, {6}}});
  checkpoint.tensor("both", {10}, {{{0}, {4}}, {{2}, {4}}});
  checkpoint.tensor("nothing", {10}, std::vector<BoxOf>{});
  ItemRows wanted;
  for (const char* name : {"hole", "twice", "both", "nothing"}) wanted.box(name, {10}, {{0}, {10}});
  for (const char* name : {"hole", "nothing"}) wanted.box(name, {10}, {{5}, {0}});  // empty: nothing to cover
  wanted.box("hole", {10}, {{6}, {4}});
  EXPECT_EQ(plan(checkpoint, wanted).uncovered, (Dims{0, 1, 2, 3}));
  checkpoint.tensor("many times", {10}, std::vector<BoxOf>(1000, BoxOf{{0}, {10}}));
  const auto found = plan(checkpoint, ItemRows().box("many times", {10}, {{0}, {10}}));
  EXPECT_EQ(found.uncovered, (Dims{0}));
  EXPECT_LE(reads_of(found).size(), 11u);
}

TEST(LoadPlan, OnlyFilesThatAreRead) {
  Checkpoint checkpoint(5);
  checkpoint.tensor("t", {50}, grid({50}, {5}));
  const auto found = plan(checkpoint, ItemRows().box("t", {50}, {{35}, {10}}).box("t", {50}, {{12}, {3}}));
  EXPECT_EQ(found.files, (std::vector<std::string>{"__1_0.distcp", "__3_0.distcp", "__4_0.distcp"}));
  EXPECT_EQ(reads_of(found)[0].item, 1);
}

TEST(LoadPlan, WantedBoxesThatLeaveTheirTensorsAreRefused) {
  Checkpoint checkpoint(1);
  checkpoint.tensor("t", {10});
  const std::vector<BoxOf> boxes{
      {{-1}, {2}}, {{0}, {11}}, {{11}, {0}}, {{5}, {6}}, {{0}, {-1}}, {{INT64_MAX}, {INT64_MAX}}, {{INT64_MIN}, {5}}};
  for (const BoxOf& box : boxes) {
    const Error error = error_of([&] { plan(checkpoint, ItemRows().box("t", {10}, {{0}, {1}}).box("t", {10}, box)); });
    EXPECT_EQ(error.kind, Error::Kind::invalid);
    EXPECT_EQ(error.item, 1);
  }
}

TEST(LoadPlan, UnknownDtypesDoNotFitEvenWithACast) {
  auto image = Checkpoint(1).tensor("t", {10}, "float16").image();
  const std::string_view text(reinterpret_cast<const char*>(image.data()), image.size());
  image[text.find("float16")] = std::byte{'g'};
  seal(image);
  const Index index(std::move(image));
  const auto found = plan_load(index, state::Inventory(ItemRows().box("t", {10}, {{0}, {10}}, "float16").pack()), true);
  ASSERT_EQ(found.mismatched.size(), 1u);
  EXPECT_EQ(found.mismatched[0].stored, "dtype torch.gloat16");
}

}  // namespace
}  // namespace vescale_ckpt::metadata
