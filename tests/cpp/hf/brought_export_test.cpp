// Exports whose ranks bring short runs to each other in a node: the files and their checksums are those of the state,
// whoever writes what.
#include <gtest/gtest.h>

#include <numeric>

#include "access_test.h"
#include "base/crc32.h"
#include "data_files.h"
#include "hf/export_layout.h"
#include "io/box_copy.h"
#include "io/table_cursor.h"
#include "plan/ranks.h"
#include "share/route_tables.h"
#include "share/routes.h"
#include "tables.h"
#include "write/box_writer.h"

namespace vescale_ckpt::hf {
namespace {

using plan::Dims;

constexpr uint64_t kPiece = 20 << 10;  // many rounds, and pieces cut within checksum cells
constexpr uint64_t kTensorsBytes = 300'000;

class BroughtExportTest : public AccessTest {
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
    layout.bring_short_runs(nodes, least_bytes);
    const auto held = layout.held(plan.catalog());
    std::vector<share::RankReads> reads;
    for (size_t rank = 0; rank < 4; ++rank) reads.push_back({held[rank], {}, nodes[rank], nodes[rank]});
    share::RouteOptions route_options;
    route_options.piece_bytes = kPiece;
    route_options.budget_bytes = 4 * kPiece;
    std::vector<uint64_t> bytes = layout.straight_bytes();
    const std::vector<share::RankRoutes> routes = share::plan_writes(reads, {}, route_options, bytes);
    rounds_ = routes[0].rounds.size();
    std::vector<std::string> paths;
    std::vector<Memory> content;
    for (size_t file = 0; file < layout.files(); ++file) {
      paths.push_back(path("file" + std::to_string(file)));
      write_file(paths.back(), std::string(layout.file_bytes(file), '?'));
      fill_random(content.emplace_back(layout.file_bytes(file)).bytes(), file);
    }

    const io::EngineOptions options = small_options(access());
    std::vector<std::unique_ptr<write::BoxWriter>> writers;
    std::vector<Memory> memory;
    std::vector<std::vector<int64_t>> tables(4), rows_of(4);
    for (uint32_t rank = 0; rank < 4; ++rank) {
      const std::vector<std::byte> packed = ranks.builder(rank).pack(0);
      const auto boxes = [&](bool all) {
        return make_export_boxes(state::Inventory(packed), plan.local_plan(rank), layout.record_locations(rank), all);
      };
      const std::vector<int64_t> own = boxes(true);
      std::vector<int64_t>&table = tables[rank], &rows = rows_of[rank];
      for (io::TableCursor cursor(own); !cursor.at_end(); cursor.next_row()) {
        cursor.take(1);
        const uint64_t file = cursor.size(), begin = cursor.size();
        cursor.take(2);
        const uint32_t dtype = cursor.dtype();
        const uint64_t dims = cursor.size();
        const auto shape = cursor.take(dims), offset = cursor.take(dims), size = cursor.take(dims);
        cursor.take(dims);
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
      writers.push_back(std::make_unique<write::BoxWriter>(paths, options));
      std::vector<int64_t> straight = boxes(false);
      straight.insert(straight.end(), routes[rank].own.begin(), routes[rank].own.end());
      writers.back()->write(share::make_box_table(straight, share::HeldRows(table, rows)));
    }
    for (size_t round = 0; round < rounds_; ++round) {
      std::vector<Memory> windows;
      std::vector<int64_t> all;
      for (int64_t rank = 0; rank < 4; ++rank) {
        const Memory& window = windows.emplace_back(routes[rank].rounds[round].memory_bytes, 0);
        all.insert(all.end(), {rank, address(window), static_cast<int64_t>(window.size())});
      }
      for (size_t rank = 0; rank < 4; ++rank) {
        const share::RouteRound& mine = routes[rank].rounds[round];
        std::vector<int64_t> near = all;
        near.insert(near.end(), {-1, address(windows[rank]), static_cast<int64_t>(windows[rank].size())});
        const share::HeldRows held_rows(tables[rank], rows_of[rank]);
        const auto copies = share::make_gather_table(mine.places, held_rows, near);
        io::copy_boxes(io::parse_copy_table(copies), 2, io::CopyWay::gather);
      }
      for (size_t rank = 0; rank < 4; ++rank) {
        writers[rank]->write(share::make_staging_table(routes[rank].rounds[round].staged, windows[rank].bytes()));
      }
    }
    bytes_.clear();
    std::vector<std::vector<uint32_t>> checksums;
    for (const auto& writer : writers) {
      checksums.push_back(writer->finish(false));
      bytes_.push_back(writer->stats().bytes());
    }

    const std::vector<std::span<const uint32_t>> blocks(checksums.begin(), checksums.end());
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

INSTANTIATE_TEST_SUITE_P(Ways, BroughtExportTest, ::testing::ValuesIn(every_access()), access_test_name);

TEST_P(BroughtExportTest, OfOneNode) {
  save({0, 0, 0, 0}, UINT64_MAX);
  EXPECT_GT(rounds_, 1u);
  const uint64_t total = std::accumulate(bytes_.begin(), bytes_.end(), uint64_t{0});
  EXPECT_GT(total, kTensorsBytes);
  save({0, 0, 0, 0}, 100'000);
  EXPECT_EQ(std::accumulate(bytes_.begin(), bytes_.end(), uint64_t{0}), total);
}

TEST_P(BroughtExportTest, OfSeveralNodes) {
  save({0, 2, 2, 0}, UINT64_MAX);
  save({1, 1, 1, 3}, 100'000);
}

TEST_P(BroughtExportTest, NotWhereItDoesNotPay) {
  save({0, 1, 2, 3}, UINT64_MAX);
  EXPECT_EQ(rounds_, 0u);
  save({0, 0, 0, 0}, UINT64_MAX, 1 << 30);
  EXPECT_EQ(rounds_, 0u);
}

}  // namespace
}  // namespace vescale_ckpt::hf
