// Routes of exports, carried out on byte arrays: every byte comes to its writer and is written once.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>

#include "base/error.h"
#include "error_of.h"
#include "io/box.h"
#include "read/reader.h"
#include "share/route_tables.h"
#include "share/routes.h"
#include "tensors.h"

namespace vescale_ckpt::share {
namespace {

using Words = std::vector<int64_t>;

class WriteJob {
 public:
  explicit WriteJob(uint32_t ranks) : held_(ranks), tables_(ranks), memory_(ranks) {}

  // A tensor behind those before it in the file, each rank with a share of it along `dim`.
  void tensor(uint32_t file, std::string_view dtype, const Sizes& sizes, size_t dim, const std::vector<uint32_t>& ranks,
              const std::vector<int64_t>& shares) {
    const uint32_t code = dtype_code(dtype);
    files_.resize(std::max<size_t>(files_.size(), file + 1));
    std::vector<std::byte>& content = files_[file];
    const auto begin = static_cast<int64_t>(content.size());
    const uint64_t bytes = format::tensor_bytes(format::dtypes()[code], sizes);
    if (bytes == 0) return;  // no one holds anything of it
    content.resize(content.size() + bytes);
    fill_random(std::span(content).subspan(static_cast<size_t>(begin)), content.size());
    Sizes offset(sizes.size()), size = sizes;
    for (size_t i = 0; i < ranks.size(); ++i) {
      size[dim] = shares[i];
      hold(ranks[i], file, begin, code, sizes, offset, size);
      offset[dim] += shares[i];
    }
  }

  // `bytes`: that each rank writes beside the routes.
  std::vector<RankRoutes> run(const RouteOptions& options, std::vector<uint64_t> bytes = {}) {
    bytes.resize(held_.size());
    std::vector<RankReads> ranks;
    for (size_t rank = 0; rank < held_.size(); ++rank) ranks.push_back({held_[rank], {}, 0, 0});
    const std::vector<RankRoutes> routes = plan_writes(ranks, options, bytes);
    written_.clear();
    for (const auto& content : files_) written_.emplace_back(content.size(), '\0');
    count_.assign(files_.size(), {});
    for (size_t file = 0; file < files_.size(); ++file) count_[file].resize(files_[file].size());
    std::vector<std::unique_ptr<HeldRows>> held;
    for (size_t rank = 0; rank < held_.size(); ++rank) {
      Words rows(memory_[rank].size());
      std::iota(rows.begin(), rows.end(), 0);
      held.push_back(std::make_unique<HeldRows>(tables_[rank], rows));
      write(make_box_table(routes[rank].own, *held.back()), false);
    }
    for (size_t round = 0; round < routes[0].rounds.size(); ++round) take(routes, round, held);
    for (size_t file = 0; file < files_.size(); ++file) {
      EXPECT_TRUE(std::ranges::all_of(count_[file], [](int count) { return count == 1; })) << file;
      EXPECT_EQ(std::memcmp(written_[file].data(), files_[file].data(), files_[file].size()), 0) << file;
    }
    return routes;
  }

 private:
  void hold(uint32_t rank, uint32_t file, int64_t begin, uint32_t dtype, const Sizes& sizes, const Sizes& offset,
            const Sizes& size) {
    const format::DType& of = format::dtypes()[dtype];
    const auto row = static_cast<int64_t>(memory_[rank].size()), dims = std::ssize(sizes);
    const Sizes strides = row % 2 == 0 ? row_major(size) : column_major(size);
    const io::Box box(of.item_bytes, sizes, offset, size, strides);
    const Memory& memory = memory_[rank].emplace_back(std::max<uint64_t>(box.bytes(), 1));
    if (box.bytes() != 0) {
      box.scatter(files_[file].data() + begin + box.begin(), box.begin(), box.end(), memory.data());
    }
    const auto append = [](Words& to, const Words& words) { to.insert(to.end(), words.begin(), words.end()); };
    append(held_[rank], {row, int64_t{file}, begin, static_cast<int64_t>(format::tensor_bytes(of, sizes)), -1,
                         int64_t{dtype}, dims});
    for (const Sizes& list : {sizes, offset, size, Sizes(sizes.size())}) append(held_[rank], list);
    append(tables_[rank], {int64_t{dtype}, address(memory), dims});
    append(tables_[rank], size);
    append(tables_[rank], strides);
  }

  void take(const std::vector<RankRoutes>& routes, size_t round, std::span<const std::unique_ptr<HeldRows>> held) {
    std::vector<Memory> memories;
    for (const RankRoutes& of_rank : routes) memories.emplace_back(of_rank.rounds.at(round).memory_bytes, 0);
    for (size_t rank = 0; rank < routes.size(); ++rank) {
      const RouteRound& mine = routes[rank].rounds[round];
      Words near = {-1, address(memories[rank]), static_cast<int64_t>(memories[rank].size())};
      for (size_t at = 0; at < mine.sends.size(); at += 3) {
        const auto peer = static_cast<size_t>(mine.sends[at]);
        EXPECT_EQ(mine.sends[at + 2], 0) << "no message between nodes";
        near.insert(near.end(), {mine.sends[at], address(memories[peer]), static_cast<int64_t>(memories[peer].size())});
      }
      io::copy_boxes(io::parse_copy_table(make_gather_table(mine.places, *held[rank], near)), 1, io::CopyWay::gather);
    }
    for (size_t rank = 0; rank < routes.size(); ++rank) {
      const RouteRound& mine = routes[rank].rounds[round];
      EXPECT_TRUE(mine.packs.empty());
      write(make_staging_table(mine.staged, memories[rank].bytes()), true);
    }
  }

  void write(const Words& boxes, bool staged) {
    for (const read::ReadItem& item : read::parse_read_table(boxes)) {
      if (item.box.bytes() == 0) continue;
      const auto begin = item.record_offset + item.box.begin();
      if (staged) {
        EXPECT_EQ(item.box.bytes(), item.box.end() - item.box.begin()) << "a piece is one range of its file";
        EXPECT_EQ((reinterpret_cast<uintptr_t>(item.memory) - begin) % kBlock, 0u) << "it needs a copy";
      }
      std::vector<std::byte> body(item.box.end() - item.box.begin());
      item.box.gather(body.data(), item.box.begin(), item.box.end(), item.memory);
      item.box.ranges(0, [&](uint64_t from, uint64_t to) {
        std::memcpy(written_[item.file].data() + item.record_offset + from, body.data() + (from - item.box.begin()),
                    to - from);
        for (uint64_t at = from; at < to; ++at) ++count_[item.file][item.record_offset + at];
      });
    }
  }

  std::vector<Words> held_, tables_;
  std::vector<std::vector<Memory>> memory_;
  std::vector<std::vector<std::byte>> files_;
  std::vector<std::string> written_;
  std::vector<std::vector<int>> count_;  // of each byte of each file: how often it was written
};

RouteOptions small(uint64_t piece_bytes) {
  RouteOptions options;
  options.piece_bytes = piece_bytes;
  options.budget_bytes = 16 * piece_bytes + 3 * kBlock;
  return options;
}

uint64_t staged_bytes(const RankRoutes& routes) {  // of matrices
  uint64_t staged = 0;
  for (const RouteRound& round : routes.rounds) {
    for (size_t at = 0; at < round.staged.size(); at += 14) {
      const auto item_bytes = format::dtypes()[static_cast<size_t>(round.staged[at + 6])].item_bytes;
      staged += static_cast<uint64_t>(round.staged[at + 12] * round.staged[at + 13]) * item_bytes;
    }
  }
  return staged;
}

TEST(WriteRoutes, RandomBoxesAreWrittenOnce) {
  std::mt19937 random(5);
  const auto pick = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  for (int trial = 0; trial < 100; ++trial) {
    SCOPED_TRACE(trial);
    const auto ranks = static_cast<uint32_t>(pick(1, 6));
    WriteJob job(ranks);
    const int64_t files = pick(1, 4);
    for (int64_t file = 0; file < files; ++file) {
      for (int64_t count = pick(1, 4); count-- > 0;) {
        Sizes sizes(static_cast<size_t>(pick(1, 3)));
        for (int64_t& size : sizes) size = pick(pick(0, 9) != 0, 30);
        const auto dim = static_cast<size_t>(pick(0, std::ssize(sizes) - 1));
        std::vector<uint32_t> who;
        std::vector<int64_t> shares;
        int64_t left = sizes[dim];
        for (uint32_t rank = 0; rank < ranks; ++rank) {
          who.push_back(rank);
          shares.push_back(rank + 1 == ranks ? left : pick(0, left));
          left -= shares.back();
        }
        std::ranges::shuffle(who, random);
        const char* const kinds[] = {"bool", "int16", "float32", "complex128"};
        job.tensor(static_cast<uint32_t>(file), kinds[pick(0, 3)], sizes, dim, who, shares);
      }
    }
    job.run(small(static_cast<uint64_t>(pick(64, 3000))));
  }
}

TEST(WriteRoutes, RanksThatHoldColumnsWriteEvenlyAndKeepToTheirMemory) {
  WriteJob job(4);
  job.tensor(0, "float32", {600, 400}, 1, {0, 1, 2, 3}, {10, 90, 200, 100});
  job.tensor(0, "int8", {900, 100}, 1, {0, 1, 2, 3}, {25, 25, 25, 25});
  const RouteOptions options = small(40 << 10);
  for (const RankRoutes& of_rank : job.run(options)) {
    for (const RouteRound& round : of_rank.rounds) {
      EXPECT_LE(round.memory_bytes, options.budget_bytes);
      EXPECT_TRUE(round.packs.empty());
    }
    EXPECT_NEAR(static_cast<double>(staged_bytes(of_rank)), (960'000 + 90'000) / 4.0, 80 << 10);
  }
}

TEST(WriteRoutes, RanksThatWriteMoreBesideTheRoutesWriteLessOfThem) {
  constexpr uint64_t kRow = 40'000, kBytes = 600 * kRow;
  WriteJob job(4);
  job.tensor(0, "float32", {600, 10'000}, 1, {0, 1, 2, 3}, {2500, 2500, 2500, 2500});
  const std::vector<uint64_t> beside = {0, 2 * kBytes, kBytes / 2, kBytes / 4};  // level: what three of them fill
  const std::vector<RankRoutes> routes = job.run(small(1 << 20), beside);
  EXPECT_EQ(staged_bytes(routes[1]), 0);
  for (const uint32_t rank : {0, 2, 3}) {
    const auto written = static_cast<double>(beside[rank] + staged_bytes(routes[rank]));
    EXPECT_NEAR(written, kBytes * 1.75 / 3, 1 << 20) << rank;
  }
}

TEST(WriteRoutes, TablesOfWhatIsHeldNameTheRowThatMakesNoSense) {
  const Memory memory(400);
  const Words table = {dtype_code("float32"), address(memory), 1, 10, 1}, rows = {3};
  const HeldRows held(table, rows);
  EXPECT_NE(held.find(3), nullptr);
  EXPECT_EQ(held.find(0), nullptr);
  EXPECT_EQ(held.find(4), nullptr);
  const auto own = [&](int64_t row, int64_t size, int64_t offset) {
    return Words{row, 0, 64, 400, -1, dtype_code("float32"), 1, 100, 0, size, offset};
  };
  EXPECT_EQ(make_box_table(own(3, 4, 6), held),
            (Words{0, 64, 400, -1, dtype_code("float32"), 1, 100, 0, 4, address(memory) + 24, 1}));
  EXPECT_TRUE(make_box_table(own(2, 4, 6), held).empty());
  EXPECT_EQ(row_of_error([&] { make_box_table(own(3, 4, 7), held); }), 0);
  EXPECT_EQ(row_of_error([&] { make_box_table(Words{3, 0, 64}, held); }), 0);
  const Words place = {-1, 0, 3, dtype_code("float32"), 1, 4, 0, 4, 6}, memories = {-1, address(memory), 16};
  EXPECT_EQ(row_of_error([&] { make_gather_table(place, held, memories); }), -2);
  EXPECT_EQ(row_of_error([&] { make_gather_table(place, held, Words{-1, address(memory), 15}); }), 0);
  EXPECT_EQ(row_of_error([&] { make_gather_table(place, held, Words{}); }), 0);
  EXPECT_THROW(HeldRows(table, Words{}), Error);
  EXPECT_THROW(HeldRows(table, Words{1, 2}), Error);
  EXPECT_THROW(HeldRows(table, Words{-1}), Error);
}

}  // namespace
}  // namespace vescale_ckpt::share
