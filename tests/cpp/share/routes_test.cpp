// Routes, carried out on byte arrays: everything that is wanted arrives, and nothing is read twice.
#include "share/routes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <tuple>

#include "base/error.h"
#include "error_of.h"
#include "io/box.h"
#include "read/reader.h"
#include "share/route_tables.h"
#include "state/tables.h"
#include "tensors.h"

namespace vescale_ckpt::share {
namespace {

using Words = std::vector<int64_t>;

struct Record {
  std::string file;
  int64_t offset;
  Tensor content;
  int64_t crc = 7;
};

struct Want {
  uint32_t rank;
  int64_t item;
  size_t record;
  Sizes box_offset, box_size;
  Sizes target;     // where in the item's box
  Sizes item_size;  // of the item's box
};

// Ranks with what they want, and what becomes of it.
class Job {
 public:
  explicit Job(uint32_t ranks) : files_(ranks), reads_(ranks), groups_(ranks, 0), nodes_(ranks), items_(ranks) {
    std::iota(nodes_.begin(), nodes_.end(), 0);
  }

  size_t record(std::string_view dtype, const Sizes& sizes, int64_t crc = 7) {
    const auto number = static_cast<int64_t>(records_.size());
    records_.push_back(
        {"file" + std::to_string(number % 3), 1000000 * number, Tensor(dtype, sizes, 0, records_.size()), crc});
    return records_.size() - 1;
  }

  // As a new item of the rank, which is `margin` longer than the box on all sides.
  void want(uint32_t rank, size_t record, const Sizes& offset, const Sizes& size, int64_t margin = 0) {
    Sizes item = size, target(size.size(), margin);
    for (int64_t& length : item) length += 2 * margin;
    const Tensor& content = records_[record].content;
    const auto number = static_cast<int64_t>(items_[rank].size());
    wants_.push_back({rank, number, record, offset, size, target, item});
    items_[rank].emplace_back(format::tensor_bytes(format::dtypes()[content.dtype], item), 0);
    auto& files = files_[rank];
    const std::string& name = records_[record].file;
    if (std::ranges::find(files, name) == files.end()) files.push_back(name);
    const int64_t file = std::ranges::find(files, name) - files.begin();
    Words& row = reads_[rank];
    row.insert(row.end(), {number, file, records_[record].offset, 500000, records_[record].crc, int64_t{content.dtype},
                           std::ssize(offset)});
    for (const Sizes* list : {&content.sizes, &offset, &size}) row.insert(row.end(), list->begin(), list->end());
    row.insert(row.end(), target.begin(), target.end());
  }

  void want_all(uint32_t rank, size_t record) {
    const Sizes& sizes = records_[record].content.sizes;
    want(rank, record, Sizes(sizes.size(), 0), sizes);
  }

  void group(uint32_t rank, uint32_t group) { groups_[rank] = group; }
  void node(uint32_t rank, uint32_t node) { nodes_[rank] = node; }
  void sees_neighbours(bool sees) { sees_neighbours_ = sees; }

  std::vector<RankRoutes> plan(const RouteOptions& options) const {
    std::vector<uint64_t> bytes(reads_.size());
    return plan(options, bytes);
  }

  // `bytes`: that each rank reads by plans before this one; becomes what it reads with it.
  std::vector<RankRoutes> plan(const RouteOptions& options, std::vector<uint64_t>& bytes) const {
    std::vector<RankReads> ranks;
    for (size_t rank = 0; rank < reads_.size(); ++rank) {
      size_t first = 0;  // whose tables it shares
      while (reads_[first] != reads_[rank] || files_[first] != files_[rank]) ++first;
      ranks.push_back({reads_[first], files_[first], groups_[rank], nodes_[rank]});
    }
    std::vector<Renumbered> renumbered;
    std::vector<RankRoutes> routes = plan_routes(ranks, options, bytes, renumbered);
    for (const Renumbered& some : renumbered) {
      std::map<int64_t, int64_t> number;
      for (size_t i = 0; i < some.ranks.size(); ++i) number[some.like.at(i)] = some.ranks[i];
      for (size_t i = 0; i < some.ranks.size(); ++i) {
        EXPECT_TRUE(routes[some.ranks[i]].own.empty());
        renumber(routes[some.ranks[i]] = routes[some.like[i]], number);
      }
    }
    return routes;
  }

  std::vector<RankRoutes> run(const RouteOptions& options) {
    std::vector<RankRoutes> routes = plan(options);
    carry_out(routes);
    return routes;
  }

  // And checks what comes of it.
  void carry_out(const std::vector<RankRoutes>& routes) {
    const size_t ranks = routes.size();
    for (auto& items : items_) {
      for (const Memory& item : items) std::ranges::fill(item.bytes(), std::byte{0xA5});
    }
    read_.assign(records_.size(), {});
    for (size_t i = 0; i < records_.size(); ++i) read_[i].assign(records_[i].content.memory.size(), {});
    for (uint32_t rank = 0; rank < ranks; ++rank) read_own(rank, routes[rank].own);
    for (size_t round = 0; round < routes[0].rounds.size(); ++round) {
      std::vector<Memory> memories;
      for (uint32_t rank = 0; rank < ranks; ++rank) {
        EXPECT_EQ(routes[rank].rounds.size(), routes[0].rounds.size());
        const RouteRound& of_rank = routes[rank].rounds[round];
        const Memory& memory = memories.emplace_back(of_rank.memory_bytes, 0);
        stage(rank, of_rank, memory);
        const Words table = make_pack_table(of_rank.packs, memory.bytes());
        io::copy_boxes(io::parse_copy_table(table), 1 + rank % 2);
      }
      exchange(routes, round, memories);
      for (uint32_t rank = 0; rank < ranks; ++rank) place(rank, routes[rank].rounds[round].places, memories);
    }
    std::vector<uint64_t> bytes(ranks);  // that each wants
    for (const Want& want : wants_) {
      expect_filled(want);
      bytes[want.rank] += format::tensor_bytes(format::dtypes()[records_[want.record].content.dtype], want.box_size);
    }
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      EXPECT_EQ(bytes[rank], routes[rank].shared_bytes + bytes_of(routes[rank].own));
    }
  }

  static uint64_t bytes_of(const Words& reads) {
    uint64_t bytes = 0;
    for (size_t at = 0; at < reads.size();) {
      const auto dtype = static_cast<size_t>(reads[at + 5]);
      bytes += format::tensor_bytes(format::dtypes()[dtype], lists(reads, at, 7, 4)[2]);
    }
    return bytes;
  }

  // How many ranks of a group read a byte of a record, at most.
  size_t most_readers(size_t record) const {
    size_t most = 0;
    for (const std::set<uint32_t>& ranks : read_[record]) {
      std::map<uint32_t, size_t> by_group;
      for (const uint32_t rank : ranks) most = std::max(most, ++by_group[groups_[rank]]);
    }
    return most;
  }

  std::vector<uint64_t> bytes_by_rank() const {
    std::vector<uint64_t> bytes(files_.size());
    for (const auto& of_record : read_) {
      for (const std::set<uint32_t>& ranks : of_record) {
        for (const uint32_t rank : ranks) ++bytes[rank];
      }
    }
    return bytes;
  }

  double imbalance() const {
    const std::vector<uint64_t> bytes = bytes_by_rank();
    const double sum = std::accumulate(bytes.begin(), bytes.end(), 0.0);
    return static_cast<double>(*std::ranges::max_element(bytes)) * static_cast<double>(bytes.size()) / sum;
  }

  size_t records() const { return records_.size(); }

  // What came to a node from others.
  uint64_t bytes_to_node(const std::vector<RankRoutes>& routes, uint32_t node) const {
    uint64_t bytes = 0;
    for (uint32_t rank = 0; rank < routes.size(); ++rank) {
      if (nodes_[rank] == node) bytes += bytes_to_rank(routes[rank]);
    }
    return bytes;
  }

  static uint64_t bytes_to_rank(const RankRoutes& routes) {
    uint64_t bytes = 0;
    for (const RouteRound& round : routes.rounds) {
      for (size_t at = 0; at < round.receives.size(); at += 3) bytes += static_cast<uint64_t>(round.receives[at + 2]);
    }
    return bytes;
  }

 private:
  static void renumber(RankRoutes& routes, const std::map<int64_t, int64_t>& number) {
    for (RouteRound& round : routes.rounds) {
      for (Words* messages : {&round.sends, &round.receives}) {
        for (size_t at = 0; at < messages->size(); at += 3) messages->at(at) = number.at(messages->at(at));
      }
      for (size_t at = 0; at < round.places.size(); at += 5 + 4 * static_cast<size_t>(round.places[at + 4])) {
        if (round.places[at] >= 0) round.places[at] = number.at(round.places[at]);
      }
    }
  }

  size_t record_at(uint32_t rank, int64_t file, int64_t offset) const {
    for (size_t i = 0; i < records_.size(); ++i) {
      if (records_[i].file == files_[rank].at(static_cast<size_t>(file)) && records_[i].offset == offset) return i;
    }
    throw std::out_of_range("no such record");
  }

  void mark(uint32_t rank, size_t record, const Sizes& offset, const Sizes& size) {
    const Tensor& content = records_[record].content;
    Memory mask(content.memory.size());
    std::ranges::fill(mask.bytes(), std::byte{0});
    const Memory ones(format::tensor_bytes(format::dtypes()[content.dtype], size));
    io::Box(format::dtypes()[content.dtype].item_bytes, content.sizes, offset, size, row_major(size))
        .gather(mask.data(), 0, mask.size(), ones.data());
    for (size_t i = 0; i < mask.size(); ++i) {
      if (mask.data()[i] != std::byte{0}) read_[record][i].insert(rank);
    }
  }

  // The four lists of a row of reads, and on to the next.
  static std::array<Sizes, 4> lists(const Words& words, size_t& at, size_t head, size_t count) {
    const auto dims = static_cast<size_t>(words.at(at + head - 1));
    std::array<Sizes, 4> result;
    at += head;
    for (size_t i = 0; i < count; ++i, at += dims) {
      result[i].assign(words.begin() + static_cast<ptrdiff_t>(at), words.begin() + static_cast<ptrdiff_t>(at + dims));
    }
    return result;
  }

  void put(uint32_t rank, int64_t item, uint32_t dtype, const std::byte* piece, const Sizes& piece_size,
           const Sizes& offset, const Sizes& size, const Sizes& target) {
    const auto want = std::ranges::find_if(wants_, [&](const Want& w) { return w.rank == rank && w.item == item; });
    const Sizes strides = row_major(want->item_size);
    const int64_t first = std::inner_product(target.begin(), target.end(), strides.begin(), int64_t{0});
    const io::Box box(format::dtypes()[dtype].item_bytes, piece_size, offset, size, strides);
    std::byte* memory = items_[rank][static_cast<size_t>(item)].data() + first * format::dtypes()[dtype].item_bytes;
    if (box.bytes() != 0) box.scatter(piece + box.begin(), box.begin(), box.end(), memory);
  }

  void read_own(uint32_t rank, const Words& own) {
    for (size_t at = 0; at < own.size();) {
      const size_t row = at;
      const auto [chunk, offset, size, target] = lists(own, at, 7, 4);
      const size_t record = record_at(rank, own[row + 1], own[row + 2]);
      const Tensor& content = records_[record].content;
      EXPECT_EQ(content.sizes, chunk);
      mark(rank, record, offset, size);
      put(rank, own[row], content.dtype, content.memory.data(), chunk, offset, size, target);
    }
  }

  void stage(uint32_t rank, const RouteRound& round, const Memory& memory) {
    for (size_t at = 0; at < round.staged.size();) {
      const size_t row = at;
      const auto [chunk, offset, size, none] = lists(round.staged, at, 8, 3);
      mark(rank, record_at(rank, round.staged[row + 2], round.staged[row + 3]), offset, size);
    }
    const Words table = make_staging_table(round.staged, memory.bytes());
    for (const read::ReadItem& item : read::parse_read_table(table)) {
      const Tensor& content = records_[record_at(rank, item.file, static_cast<int64_t>(item.record_offset))].content;
      EXPECT_EQ(content.sizes, item.chunk_sizes);
      const io::Box& box = item.box;
      box.scatter(content.memory.data() + box.begin(), box.begin(), box.end(), item.memory);
      const uint64_t place = (reinterpret_cast<uintptr_t>(item.memory) - box.begin() - 64) % 4096;
      EXPECT_TRUE(box.bytes() < 64 << 10 || place == 0) << "it could not be read in place";
    }
  }

  void exchange(const std::vector<RankRoutes>& routes, size_t round, const std::vector<Memory>& memories) const {
    const size_t ranks = routes.size();
    size_t under_way = 0;
    for (size_t rank = 0; rank < ranks; ++rank) {
      under_way += routes[rank].rounds[round].sends.size() / 3;
      const Words& receives = routes[rank].rounds[round].receives;
      for (size_t at = 0; at < receives.size(); at += 3) {
        const auto from = static_cast<size_t>(receives[at]);
        EXPECT_EQ(groups_[from], groups_[rank]) << "each group reads for itself";
        const Words& sends = routes[from].rounds[round].sends;
        size_t sent = 0;
        while (sent < sends.size() && sends[sent] != static_cast<int64_t>(rank)) sent += 3;
        ASSERT_LT(sent, sends.size()) << "it waits for ever";
        EXPECT_EQ(receives[at + 2], sends[sent + 2]);
        EXPECT_EQ(sends[sent + 2] == 0, sees_neighbours_ && nodes_[from] == nodes_[rank])
            << "within a node nothing is sent";
        std::ranges::copy(memories[from].bytes().subspan(sends[sent + 1], sends[sent + 2]),
                          memories[rank].bytes().subspan(receives[at + 1], receives[at + 2]).begin());
        --under_way;
      }
    }
    EXPECT_EQ(under_way, 0u) << "nobody receives it";
  }

  void place(uint32_t rank, const Words& places, const std::vector<Memory>& memories) {
    for (size_t at = 0; at < places.size();) {
      const size_t row = at;
      const auto [piece, offset, size, target] = lists(places, at, 5, 4);
      const size_t in = places[row] < 0 ? rank : static_cast<size_t>(places[row]);
      EXPECT_TRUE(in == rank || (sees_neighbours_ && nodes_[in] == nodes_[rank]));
      const std::byte* from = memories.at(in).bytes().subspan(static_cast<size_t>(places[row + 1])).data();
      put(rank, places[row + 2], static_cast<uint32_t>(places[row + 3]), from, piece, offset, size, target);
    }
  }

  void expect_filled(const Want& want) const {
    const Tensor& content = records_[want.record].content;
    const Memory wanted = content.box(want.box_offset, want.box_size);
    const io::Box inside(format::dtypes()[content.dtype].item_bytes, want.item_size, want.target, want.box_size,
                         row_major(want.box_size));
    const Memory& item = items_[want.rank][static_cast<size_t>(want.item)];
    Memory found(inside.bytes());
    if (inside.bytes() != 0) {
      inside.scatter(item.data() + inside.begin(), inside.begin(), inside.end(), found.data());
    }
    EXPECT_EQ(found.text(), wanted.text()) << "rank " << want.rank << ", item " << want.item;
    uint64_t untouched = 0;  // 0xA5 by itself
    for (const std::byte byte : item.bytes()) untouched += byte == std::byte{0xA5};
    EXPECT_GE(untouched + inside.bytes(), item.size());
  }

  std::vector<Record> records_;
  std::vector<Want> wants_;
  std::vector<std::vector<std::string>> files_;  // by rank
  std::vector<Words> reads_;
  std::vector<uint32_t> groups_, nodes_;
  bool sees_neighbours_ = true;
  std::vector<std::vector<Memory>> items_;
  std::vector<std::vector<std::set<uint32_t>>> read_;  // by record, of each byte: the ranks that read it
};

RouteOptions small(uint64_t piece_bytes, size_t ranks) {
  RouteOptions options;
  options.piece_bytes = piece_bytes;
  options.budget_bytes = 4096 + piece_bytes * (4 * ranks + 2);
  options.whole_bytes = 3 * piece_bytes;
  return options;
}

void expect_within(const std::vector<RankRoutes>& routes, uint64_t budget) {
  for (const RankRoutes& of_rank : routes) {
    for (const RouteRound& round : of_rank.rounds) EXPECT_LE(round.memory_bytes, budget);
  }
}

TEST(Routes, RandomBoxesArriveAndAreReadOnce) {
  std::mt19937 random(3);
  const auto pick = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  for (int trial = 0; trial < 300; ++trial) {
    SCOPED_TRACE(trial);
    const auto ranks = static_cast<uint32_t>(pick(1, 6));
    Job job(ranks);
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      job.group(rank, static_cast<uint32_t>(pick(0, trial % 3 == 0)));
      if (trial % 2 == 0) job.node(rank, static_cast<uint32_t>(pick(0, 1)));
    }
    RouteOptions options = small(static_cast<uint64_t>(pick(1, 600)), ranks);
    const char* const kinds[] = {"bool", "int16", "float32", "complex128"};
    std::vector<bool> split_is_costly;
    for (int64_t count = pick(1, 6); count-- > 0;) {
      Sizes sizes(static_cast<size_t>(pick(0, 3)));
      for (int64_t& size : sizes) size = pick(pick(0, 9) != 0, 9);
      const bool checked_whole = pick(0, 4) == 0;
      const size_t record = job.record(kinds[pick(0, 3)], sizes, checked_whole ? -1 : 5);
      for (int64_t wants = pick(0, 2 * ranks); wants-- > 0;) {
        Sizes offset = sizes, size = sizes;
        for (size_t dim = 0; dim < sizes.size(); ++dim) {
          size[dim] = pick(0, 2) == 0 ? sizes[dim] : pick(std::min<int64_t>(1, sizes[dim]), sizes[dim]);
          if (pick(0, 19) == 0) size[dim] = 0;
          offset[dim] = pick(0, sizes[dim] - size[dim]);
        }
        job.want(static_cast<uint32_t>(pick(0, ranks - 1)), record, offset, size, pick(0, 2));
      }
      split_is_costly.push_back(checked_whole);
    }
    expect_within(job.run(options), options.budget_bytes);
    for (size_t record = 0; record < job.records(); ++record) {
      EXPECT_TRUE(split_is_costly[record] || job.most_readers(record) <= 1) << record;
    }
  }
}

TEST(Routes, WhatRanksOfANodeWantTogetherComesOnce) {
  // Ranks want overlapping columns, or one wants all and the others a part.
  const auto to_second_node = [](const std::vector<std::pair<Sizes, Sizes>>& boxes) {
    Job job(4);
    const size_t record = job.record("int16", {60, 40});
    for (uint32_t rank = 0; rank < 4; ++rank) {
      job.node(rank, rank / 2);
      if (rank < 2) job.want_all(rank, record);
    }
    for (size_t i = 0; i < boxes.size(); ++i) job.want(2 + i % 2, record, boxes[i].first, boxes[i].second);
    const std::vector<RankRoutes> routes = job.run(small(1000, 4));
    EXPECT_EQ(job.most_readers(record), 1u);
    uint64_t read = 0;
    for (const uint32_t rank : {2u, 3u}) read += job.bytes_by_rank()[rank];
    return job.bytes_to_node(routes, 1) + read;
  };
  const uint64_t alignment = 1600;  // of the boxes in messages
  EXPECT_LE(to_second_node({{{0, 0}, {60, 20}}, {{0, 20}, {60, 20}}}), 4800u + alignment) << "halves";
  EXPECT_LE(to_second_node({{{0, 0}, {60, 30}}, {{0, 10}, {60, 30}}}), 4800u + alignment) << "overlapping";
  EXPECT_LE(to_second_node({{{0, 0}, {60, 40}}, {{0, 10}, {60, 10}}}), 4800u + alignment) << "one within the other";
  EXPECT_LE(to_second_node({{{0, 0}, {60, 8}}, {{0, 16}, {60, 8}}}), 1920u + alignment) << "apart: not what is between";
  EXPECT_LE(to_second_node({{{0, 0}, {60, 8}}, {{0, 0}, {60, 8}}, {{0, 0}, {60, 8}}}), 960u + alignment) << "twice";
}

TEST(Routes, WhatAllWouldReadAloneIsEstimated) {
  const auto gain = [](const Sizes& sizes, size_t dim, int64_t crc = 7) {
    Job job(4);
    const size_t record = job.record("uint8", sizes, crc);
    for (uint32_t rank = 0; rank < 4; ++rank) {
      Sizes offset(sizes.size(), 0), size = sizes;
      size[dim] = sizes[dim] / 4;
      offset[dim] = size[dim] * rank;
      job.want(rank, record, offset, size);
    }
    const RankRoutes routes = job.plan({})[0];
    return routes.once_bytes == 0 ? 0.0
                                  : static_cast<double>(routes.alone_bytes) / static_cast<double>(routes.once_bytes);
  };
  EXPECT_LT(gain({4096, 4096}, 0), 1.3) << "rows";
  EXPECT_NEAR(gain({4096, 4096}, 1), 4, 0.3) << "columns lie close together";
  EXPECT_LT(gain({4, 8192, 512}, 1), 1.5) << "long runs of rows in each layer";
  EXPECT_NEAR(gain({4096, 512}, 0, -1), 4, 0.01) << "checked as a whole";
}

TEST(Routes, TightBudgetsMakeRanksTakeTurns) {
  Job job(6);
  const size_t record = job.record("uint8", {60000});
  for (uint32_t rank = 0; rank < 6; ++rank) job.want_all(rank, record);
  RouteOptions options = small(1000, 6);
  options.budget_bytes = 3500;
  const std::vector<RankRoutes> routes = job.run(options);
  expect_within(routes, options.budget_bytes);
  EXPECT_EQ(job.most_readers(record), 1u);
  for (const uint64_t bytes : job.bytes_by_rank()) EXPECT_GT(bytes, 0u);
}

TEST(Routes, WhatReplicasOfAShardWantIsPackedOnce) {
  Job job(16);
  const size_t record = job.record("uint8", {100, 40});
  for (uint32_t rank = 0; rank < 16; ++rank) job.want(rank, record, {0, rank % 2 * 20}, {100, 20});
  RouteOptions options;
  options.piece_bytes = 4000;
  options.budget_bytes = 12000;
  const std::vector<RankRoutes> routes = job.run(options);
  expect_within(routes, options.budget_bytes);
  EXPECT_EQ(job.most_readers(record), 1u);
  size_t words = 0;
  for (const RankRoutes& of_rank : routes) words += of_rank.rounds.at(0).packs.size();
  EXPECT_EQ(words, 2u * (4 + 3 * 2)) << "a row for each half, however many want it";
}

TEST(Routes, ReadersOfWhatAllNeedReadEquallyMuch) {
  for (const uint32_t ranks : {2u, 3u}) {
    Job job(ranks);
    // Smaller than a piece each, and one large tensor of many pieces.
    for (int64_t i = 0; i < 40; ++i) job.record("float32", {50 + i, 100});
    job.record("float32", {3000, 1000});
    for (size_t record = 0; record < job.records(); ++record) {
      for (uint32_t rank = 0; rank < ranks; ++rank) job.want_all(rank, record);
    }
    // Counting bytes of so much is slow: the rows are enough.
    const std::vector<RankRoutes> routes = job.plan(small(100 << 10, ranks));
    uint64_t most = 0, sum = 0;
    for (const RankRoutes& of_rank : routes) {
      EXPECT_TRUE(of_rank.own.empty());
      uint64_t bytes = 0;
      for (const RouteRound& round : of_rank.rounds) {
        const Memory memory(round.memory_bytes, 0);
        for (const read::ReadItem& item : read::parse_read_table(make_staging_table(round.staged, memory.bytes()))) {
          bytes += item.box.bytes();
        }
        EXPECT_TRUE(round.packs.empty()) << "what all want is sent as it was read";
      }
      most = std::max(most, bytes);
      sum += bytes;
    }
    EXPECT_EQ(sum, 4 * (3000 * 1000 + 100 * (50 * 40 + 780)));
    EXPECT_LE(static_cast<double>(most) * ranks / static_cast<double>(sum), 1.05);
  }
}

TEST(Routes, WhatOneRankNeedsItReadsInPlace) {
  Job job(2);
  const size_t record = job.record("int32", {64, 64});
  job.want(0, record, {0, 0}, {32, 64});
  job.want(1, record, {32, 0}, {32, 64}, 1);
  const std::vector<RankRoutes> routes = job.run(small(1024, 2));
  EXPECT_TRUE(routes[0].rounds.empty());
  for (const RankRoutes& of_rank : routes) EXPECT_EQ(of_rank.own.size(), 7u + 8u) << "one row, as it was";
}

TEST(Routes, ReadersWithMuchOfTheirOwnReadLessForOthers) {
  Job job(2);
  job.want_all(0, job.record("uint8", {8 << 20}));
  const size_t shared = job.record("uint8", {12 << 20});
  for (uint32_t rank = 0; rank < 2; ++rank) job.want_all(rank, shared);
  const std::vector<RankRoutes> routes = job.plan(small(1 << 20, 2));
  const auto staged = [&](uint32_t rank) {
    uint64_t bytes = 0;
    for (const RouteRound& round : routes[rank].rounds) {
      if (!round.sends.empty()) bytes += static_cast<uint64_t>(round.sends[2]);
    }
    return bytes;
  };
  EXPECT_NEAR(static_cast<double>(staged(1)) / (1 << 20), 10, 0.6);
  EXPECT_NEAR(static_cast<double>(staged(0) + staged(1)) / (1 << 20), 12, 0.1);
}

TEST(Routes, RecordsThatAreCheckedAsAWholeAreReadByOne) {
  for (const bool verify : {true, false}) {
    Job job(3);
    const size_t fits = job.record("uint8", {50, 50}, -1), too_large = job.record("uint8", {100, 100}, -1);
    for (uint32_t rank = 0; rank < 3; ++rank) {
      job.want(rank, fits, {10 * rank, 0}, {10, 50});
      job.want_all(rank, too_large);
    }
    RouteOptions options = small(1000, 3);
    options.verify = verify;
    const std::vector<RankRoutes> routes = job.run(options);
    EXPECT_EQ(job.most_readers(fits), 1u);
    EXPECT_EQ(job.most_readers(too_large), verify ? 3u : 1u);
    size_t words = 0;  // of pieces
    for (const RankRoutes& of_rank : routes) {
      for (const RouteRound& round : of_rank.rounds) words += round.staged.size();
    }
    EXPECT_EQ(words == 8 + 3 * 2, verify) << "`fits` is one piece, and the only one";
  }
}

int64_t rank_of_error(const std::vector<Words>& reads) {
  const std::vector<std::string> files{"file"};
  std::vector<RankReads> ranks;
  for (const Words& words : reads) ranks.push_back({words, files, 0});
  std::vector<uint64_t> bytes(ranks.size());
  std::vector<Renumbered> renumbered;
  return row_of_error([&] { plan_routes(ranks, {}, bytes, renumbered); });
}

TEST(Routes, MalformedReadsNameTheRank) {
  const Words good = {0, 0, 0, 900, 5, int64_t{dtype_code("int16")}, 1, 100, 10, 20, 0};
  EXPECT_EQ(rank_of_error({good, good}), -2);
  const auto changed = [&](size_t at, int64_t value) {
    Words bad = good;
    bad[at] = value;
    return rank_of_error({good, bad});
  };
  EXPECT_EQ(changed(1, 1), 1);    // a file it has not named
  EXPECT_EQ(changed(3, 901), 1);  // ranks disagree
  EXPECT_EQ(changed(4, 6), 1);
  EXPECT_EQ(changed(5, 1000), 1);  // dtype
  EXPECT_EQ(changed(6, 2), 1);     // ends early
  EXPECT_EQ(changed(6, -1), 1);
  EXPECT_EQ(changed(8, 90), 1);  // leaves the chunk
  EXPECT_EQ(changed(8, -1), 1);
  EXPECT_EQ(changed(7, int64_t{1} << 62), 1);  // more bytes than there are
  EXPECT_EQ(rank_of_error({{1, 2, 3}, good}), 0);
}

TEST(ManyNodes, WhatReplicasWantArrivesAndIsReadOnceForSoManyNodes) {
  std::mt19937 random(5);
  const auto pick = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  size_t read_again = 0;
  for (int trial = 0; trial < 200; ++trial) {
    SCOPED_TRACE(trial);
    const auto nodes = static_cast<uint32_t>(pick(2, 14)), near = static_cast<uint32_t>(pick(1, 3));
    const auto kinds = static_cast<uint32_t>(pick(1, 4));  // of ranks: those of one are replicas
    const uint32_t ranks = nodes * near - static_cast<uint32_t>(pick(0, near - 1));
    Job job(ranks);
    std::vector<uint32_t> kind(ranks);
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      job.node(rank, trial % 5 == 0 ? static_cast<uint32_t>(pick(0, nodes)) : rank / near);
      kind[rank] = trial % 4 == 0 ? static_cast<uint32_t>(pick(0, kinds - 1)) : rank % kinds;
      job.group(rank, trial % 7 == 0 ? rank % 2 : 0);
    }
    RouteOptions options = small(static_cast<uint64_t>(pick(100, 4000)), 1);
    options.budget_bytes += 3 * 4096;
    options.most_nodes = static_cast<uint32_t>(pick(1, 4));
    options.sees_neighbours = trial % 6 != 0;
    job.sees_neighbours(options.sees_neighbours);
    std::vector<bool> split_is_costly;
    for (int64_t count = pick(1, 5); count-- > 0;) {
      const Sizes sizes = {pick(1, 40), pick(1, 40)};
      split_is_costly.push_back(pick(0, 5) == 0);
      const size_t record = job.record("float32", sizes, split_is_costly.back() ? -1 : 5);
      for (uint32_t of = 0; of < kinds; ++of) {
        if (pick(0, 5) == 0) continue;
        Sizes offset(2, 0), size = sizes;  // all, a share along a dimension, or any box
        const auto dim = static_cast<size_t>(pick(0, 1));
        const int64_t way = pick(0, 2);
        offset[dim] = way == 0 ? 0 : way == 1 ? sizes[dim] * of / kinds : pick(0, sizes[dim] - 1);
        size[dim] = way == 0   ? sizes[dim]
                    : way == 1 ? sizes[dim] * (of + 1) / kinds - offset[dim]
                               : pick(1, sizes[dim] - offset[dim]);
        for (uint32_t rank = 0; rank < ranks; ++rank) {
          if (kind[rank] == of) job.want(rank, record, offset, size);
        }
      }
    }
    const std::vector<RankRoutes> routes = job.run(options);
    expect_within(routes, options.budget_bytes);
    for (size_t record = 0; record < job.records(); ++record) {
      const size_t readers = job.most_readers(record);
      const size_t most = (nodes + options.most_nodes) / options.most_nodes;  // of nodes + 1
      EXPECT_TRUE(split_is_costly[record] || readers <= (most == 1 ? 1 : 2 * most)) << record;
      read_again += readers > 1;
    }
  }
  EXPECT_GT(read_again, 100u);
}

TEST(ManyNodes, EachSixteenReadAndAreSentToByThemselves) {
  constexpr uint32_t kNodes = 40, kNear = 2;
  for (const bool alike : {true, false}) {  // whether ranks want nothing else
    Job job(kNodes * kNear);
    const size_t record = job.record("uint8", {3 << 20});
    for (uint32_t rank = 0; rank < kNodes * kNear; ++rank) {
      job.node(rank, rank / kNear);
      job.want_all(rank, record);
      if (!alike) job.want_all(rank, job.record("uint8", {100}));
    }
    std::vector<uint64_t> bytes(kNodes * kNear);
    const std::vector<RankRoutes> routes = job.plan({}, bytes);
    EXPECT_EQ(std::accumulate(bytes.begin(), bytes.end(), uint64_t{0}), (3u * 3 << 20) + (alike ? 0 : 8000));
    EXPECT_EQ(routes[0].once_bytes, 3u * 3 << 20);
    EXPECT_EQ(routes[0].alone_bytes, uint64_t{kNodes} * kNear * (3 << 20));
    for (uint32_t rank = 0; rank < routes.size(); ++rank) {
      std::set<int64_t> peers;
      for (const RouteRound& round : routes[rank].rounds) {
        for (const Words* table : {&round.sends, &round.receives}) {
          for (size_t at = 0; at < table->size(); at += 3) peers.insert((*table)[at] / kNear);
        }
      }
      EXPECT_LE(peers.size(), 16u);
    }
  }
}

TEST(ManyNodes, WhatFewOfThemWantIsReadOnce) {
  Job job(40);
  const size_t all = job.record("uint8", {1000}), few = job.record("uint8", {1000}),
               sharded = job.record("uint8", {1000});
  for (uint32_t rank = 0; rank < 40; ++rank) {
    job.want_all(rank, all);
    if (rank % 5 == 0) job.want_all(rank, few);
    job.want(rank, sharded, {25 * rank}, {25});
  }
  job.run({});
  EXPECT_EQ(job.most_readers(all), 3u);
  EXPECT_EQ(job.most_readers(few), 1u);
  EXPECT_EQ(job.most_readers(sharded), 1u);
}

TEST(SplitReads, RowsOfARecordStayTogetherOnAllRanks) {
  const auto row = [](int64_t item, int64_t file, int64_t offset) {
    return Words{item, file, offset, 900, 5, int64_t{dtype_code("int16")}, 1, 100, 10, 20, 0};
  };
  Words first, second;  // which number files differently
  for (int64_t i = 0; i < 60; ++i) {
    state::append(first, row(i, i % 2, 1000 * (i / 2)));
    state::append(second, row(59 - i, 1 - i % 2, 1000 * (i / 2)));
  }
  const std::vector<std::string> ab{"a", "b"}, ba{"b", "a"};
  const auto of_first = split_reads(first, ab, 3, 2500), of_second = split_reads(second, ba, 3, 2500);
  size_t words = 0;
  for (size_t part = 0; part < 3; ++part) {
    EXPECT_EQ(of_first[part].size(), of_second[part].size());
    for (size_t at = 0; at < of_first[part].size(); at += 11) {
      EXPECT_EQ(ab[static_cast<size_t>(of_first[part][at + 1])], ba[static_cast<size_t>(of_second[part][at + 1])]);
      EXPECT_EQ(of_first[part][at + 2], of_second[part][at + 2]);
    }
    words += of_first[part].size();
  }
  EXPECT_EQ(words, first.size());
  EXPECT_EQ(split_reads(first, ab, 1, 1)[0], first);

  for (const int64_t stride : {1, 3, 4, 8}) {  // records of one size, in ranges: parts stay even
    Words same;
    for (int64_t i = 0; i < 4000; ++i) state::append(same, row(i, 0, 2500 * stride * i));
    for (const Words& part : split_reads(same, {{"a"}}, 4, 2500)) {
      EXPECT_NEAR(static_cast<double>(part.size()), same.size() / 4.0, same.size() / 20.0) << stride;
    }
  }
  EXPECT_THROW(split_reads(row(0, 2, 0), ab, 2, 10), Error);
  EXPECT_THROW(split_reads(Words{0, 0, 0, 900, 5, 1, 1, 100}, ab, 2, 10), Error);
  EXPECT_THROW(split_reads(Words{1, 2, 3}, ab, 2, 10), Error);
}

TEST(RouteTables, RowsThatLeaveTheMemoryAreRefused) {
  const Memory memory(100);
  const int64_t dtype = dtype_code("int16");
  const Words pack = {0, 60, dtype, 1, 30, 10, 20};
  EXPECT_EQ(make_pack_table(pack, memory.bytes()).size(), 8u);
  for (const auto& [at, value] : std::vector<std::pair<size_t, int64_t>>{{0, 41}, {1, 61}, {0, -1}, {2, 999}, {3, 2}}) {
    Words bad = pack;
    bad[at] = value;
    EXPECT_THROW(make_pack_table(bad, memory.bytes()), Error) << at;
  }
  const Words staged = {20, 3, 0, 0, 900, 5, dtype, 1, 100, 10, 40};
  EXPECT_EQ(make_staging_table(staged, memory.bytes()).size(), 11u);
  EXPECT_THROW(make_staging_table(staged, memory.bytes().first(99)), Error);
}

}  // namespace
}  // namespace vescale_ckpt::share
