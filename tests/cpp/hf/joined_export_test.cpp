// Exports whose ranks put ranges together in a node: the files and their checksums are those of the state, whoever
// writes what.
#include <gtest/gtest.h>

#include <numeric>
#include <thread>

#include "access_test.h"
#include "base/crc32.h"
#include "data_files.h"
#include "hf/export_layout.h"
#include "io/table_cursor.h"
#include "plan/ranks.h"
#include "tables.h"
#include "write/shared_writer.h"

namespace vescale_ckpt::hf {
namespace {

using plan::Dims;

constexpr uint64_t kWindow = 40 << 10;  // many rounds, and ranges cut within checksum cells
constexpr uint64_t kTensorsBytes = 300'000;

class JoinedExportTest : public AccessTest {
 protected:
  // A tensor of which each rank has a part along `dim`.
  static void add(plan::Ranks& ranks, std::string_view name, const Dims& shape, size_t dim, const Dims& lengths,
                  std::string_view dtype) {
    Dims offset(shape.size()), size = shape;
    for (size_t rank = 0; rank < lengths.size(); ++rank) {
      size[dim] = lengths[rank];
      if (lengths[rank] != 0) ranks.shard(rank, name, shape, offset, size, dtype);
      offset[dim] += lengths[rank];
    }
  }

  static plan::Ranks state() {
    plan::Ranks ranks(4);
    add(ranks, "a, columns", {61, 1003}, 1, {300, 3, 200, 500}, "float32");
    add(ranks, "b, rows", {101, 77}, 0, {30, 1, 40, 30}, "int8");
    add(ranks, "c, few", {3}, 0, {1, 0, 1, 1}, "float16");
    add(ranks, "d, columns", {500, 33}, 1, {1, 30, 1, 1}, "int8");
    add(ranks, "e, middle", {7, 40, 9}, 1, {10, 10, 19, 1}, "float64");
    for (size_t rank = 0; rank < 4; ++rank) {
      const auto row = static_cast<int64_t>(rank / 2) * 45, column = static_cast<int64_t>(rank % 2) * 101;
      ranks.shard(rank, "f, both", {90, 202}, {row, column}, {45, 101}, "float32");
    }
    ranks.tensor(2, "g, of one", {5000}, "int8");
    ranks.tensor(3, "h, empty", {0, 4});
    ranks.replicated("i, replicas", {51, 1000});
    return ranks;
  }

  // Writes all ranks' boxes and compares the files.
  void save(const std::vector<uint32_t>& nodes, uint64_t most_file_bytes, uint64_t least_bytes = 1) {
    plan::Ranks ranks = state();
    const plan::GlobalPlan plan = ranks.plan({plan::Placement::balanced, 1});
    ExportLayout layout(plan.catalog(), most_file_bytes, {{"format", "pt"}}, {});
    layout.join(nodes, kWindow, least_bytes);
    rounds_ = layout.rounds();
    std::vector<std::string> paths;
    std::vector<Memory> content;
    for (size_t file = 0; file < layout.files(); ++file) {
      paths.push_back(path("file" + std::to_string(file)));
      write_file(paths.back(), std::string(layout.file_bytes(file), '?'));
      fill_random(content.emplace_back(layout.file_bytes(file)).bytes(), file);
    }

    const io::EngineOptions options = small_options(access());
    std::vector<std::unique_ptr<write::SharedWriter>> writers;
    std::vector<Memory> memory, windows;  // a window of each rank
    std::vector<std::vector<std::byte*>> of_node(4);
    for (uint32_t rank = 0; rank < 4; ++rank) {
      windows.emplace_back(kWindow, 0);
      of_node[nodes[rank]].push_back(windows.back().data());
      const std::vector<std::byte> packed = ranks.builder(rank).pack(0);
      const auto own =
          make_export_targets(state::Inventory(packed), plan.local_plan(rank), layout.record_locations(rank));
      std::vector<int64_t> table, rows;
      for (io::TableCursor cursor(own); !cursor.at_end(); cursor.next_row()) {
        const uint64_t file = cursor.size(), begin = cursor.size();
        const uint32_t dtype = cursor.dtype();
        const uint64_t dims = cursor.size();
        const auto shape = cursor.take(dims), offset = cursor.take(dims), size = cursor.take(dims);
        Dims turned(size.rbegin(), size.rend());  // every other tensor with its dimensions the other way round
        Dims strides = row_major(cursor.row() % 2 == 0 ? Dims(size.begin(), size.end()) : turned);
        if (cursor.row() % 2 != 0) std::ranges::reverse(strides);
        const io::Box box(format::dtypes()[dtype].item_bytes, shape, offset, size, strides);
        Memory& held = memory.emplace_back(box.bytes());
        box.scatter(content[file].data() + begin, 0, UINT64_MAX, held.data());
        rows.push_back(cursor.row());
        table.insert(table.end(), {int64_t{dtype}, address(held), static_cast<int64_t>(dims)});
        table.insert(table.end(), size.begin(), size.end());
        table.insert(table.end(), strides.begin(), strides.end());
      }
      std::vector<int64_t> targets = own;
      const std::vector<int64_t> joined = layout.joined_targets(rank);
      targets.insert(targets.end(), joined.begin(), joined.end());
      writers.push_back(std::make_unique<write::SharedWriter>(paths, targets, options));
      const auto number = static_cast<uint32_t>(std::count(nodes.begin(), nodes.begin() + rank, nodes[rank]));
      writers.back()->join(layout.joined_ranges(rank), number, kWindow, rows.size());
      writers.back()->write(table, rows);
    }
    const auto all = [&](const std::function<void(uint32_t)>& step) {
      std::vector<std::jthread> threads;
      for (uint32_t rank = 0; rank < 4; ++rank) threads.emplace_back(step, rank);
    };
    for (uint64_t round = 0; round < layout.rounds(); ++round) {
      all([&](uint32_t rank) { writers[rank]->fill(round, of_node[nodes[rank]]); });
      all([&](uint32_t rank) { writers[rank]->send(round, windows[rank].data()); });
    }
    bytes_.clear();
    std::vector<std::span<const uint32_t>> blocks;
    for (const auto& writer : writers) {
      blocks.push_back(writer->finish(false));
      bytes_.push_back(writer->stats().bytes());
    }

    const std::vector<std::string> heads = layout.heads(blocks);
    for (size_t file = 0; file < layout.files(); ++file) {
      const SafetensorsHeader header = SafetensorsHeader::parse(heads[file], layout.file_bytes(file), "file", true);
      const uint64_t first = header.data_begin();
      EXPECT_TRUE(read_file(paths[file]).substr(first) == content[file].text().substr(first)) << file;
      for (const SafetensorsHeader::Tensor& tensor : header.tensors()) {
        uint64_t at = tensor.begin;
        for (const uint32_t block : header.blocks(tensor)) {
          const uint64_t next = std::min(tensor.end, align_down(at, format::kChecksumBlock) + format::kChecksumBlock);
          EXPECT_EQ(block, crc32(0, content[file].data() + at, next - at)) << tensor.name << " at " << at;
          at = next;
        }
        EXPECT_EQ(at, tensor.end);
      }
    }
  }

  uint64_t rounds_ = 0;
  std::vector<uint64_t> bytes_;  // that each rank wrote
};

INSTANTIATE_TEST_SUITE_P(Ways, JoinedExportTest, ::testing::ValuesIn(every_access()), access_test_name);

TEST_P(JoinedExportTest, OfOneNode) {
  save({0, 0, 0, 0}, UINT64_MAX);
  EXPECT_GT(rounds_, 1u);
  const uint64_t total = std::accumulate(bytes_.begin(), bytes_.end(), uint64_t{0});
  EXPECT_GT(total, kTensorsBytes);
  save({0, 0, 0, 0}, 100'000);
  EXPECT_EQ(std::accumulate(bytes_.begin(), bytes_.end(), uint64_t{0}), total);
}

TEST_P(JoinedExportTest, OfSeveralNodes) {
  save({0, 2, 2, 0}, UINT64_MAX);
  save({1, 1, 1, 3}, 100'000);
}

TEST_P(JoinedExportTest, NotWhereItDoesNotPay) {
  save({0, 1, 2, 3}, UINT64_MAX);
  EXPECT_EQ(rounds_, 0u);
  save({0, 0, 0, 0}, UINT64_MAX, 1 << 30);
  EXPECT_EQ(rounds_, 0u);
}

TEST(JoinedExport, RefusesRangesThatMakeNoSense) {
  const std::vector<int64_t> target = {0, 64, code_of("uint8"), 1, 10'000, 8192 - 64, 100};
  const std::vector<int64_t> fine = {0, 8192, 12288, 1, 0, 4096};
  const auto row = [&](const std::vector<int64_t>& ranges, uint32_t writer, const std::vector<int64_t>& targets) {
    write::SharedWriter out({"file"}, targets, {});
    return row_of_error([&] { out.join(ranges, writer, 8192, 0); });
  };
  EXPECT_EQ(row(fine, 1, target), -2);
  EXPECT_EQ(row(fine, 0, target), 0);  // another's range
  EXPECT_EQ(row(fine, 1, {0, 64, code_of("uint8"), 1, 10'000, 8191 - 64, 100}), 0);
  EXPECT_EQ(row(fine, 1, {0, 64, code_of("int32"), 1, 10'000, 8192 - 64, 100}), 0);
  for (const std::vector<int64_t>& ranges : std::vector<std::vector<int64_t>>{{1, 8192, 12288, 1, 0, 4096},
                                                                              {0, 8192, 12287, 1, 0, 4096},
                                                                              {0, 8192, 8192, 1, 0, 4096},
                                                                              {0, 8192, 16384, 1, 0, 4096},
                                                                              {0, 8192, 12288, 1, 0, 8192},
                                                                              {0, 8192, 12288, 1, 9, 4096},
                                                                              {0, 8192}}) {
    EXPECT_EQ(row(ranges, 1, target), 0);
  }
}

}  // namespace
}  // namespace vescale_ckpt::hf
