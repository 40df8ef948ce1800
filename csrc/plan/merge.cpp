#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/large_vector.h"
#include "base/workers.h"
#include "plan/layout.h"
#include "plan/row_check.h"
#include "plan/validate.h"

namespace vescale_ckpt::plan {
namespace {

// Keeps the error of the first wrong class, whichever thread finds it. Classes are sorted by their first keys, so this
// is the error of the first wrong key.
class Faults {
 public:
  explicit Faults(const Layout& layout) : layout_(layout) {}

  void note(uint32_t number, std::string text) {
    const std::lock_guard lock(mutex_);
    keys_ += layout_.classes[number].keys;
    if (number >= first_) return;
    first_ = number;
    text_ = std::move(text);
  }
  void raise() const {
    if (keys_ == 0) return;
    const std::string more = keys_ > 1 ? " (and " + std::to_string(keys_ - 1) + " more keys have faults)" : "";
    throw Error::invalid(text_ + more);
  }

 private:
  const Layout& layout_;
  std::mutex mutex_;  // guards all below
  uint32_t first_ = UINT32_MAX;
  size_t keys_ = 0;
  std::string text_;
};

// One inventory row of each slot of all ranks, sorted by class; rows of one class are in the order of their ranks.
struct Rows {
  std::vector<uint64_t> begin;  // start of each class's rows, and the end
  LargeVector<uint64_t> places;
  LargeVector<Holder> holders;
  std::vector<uint64_t> dims_begin;        // start of each class's words in dims
  LargeVector<int64_t> dims;               // offset[ndim], size[ndim] of row after row
  LargeVector<uint32_t> holders_of_chunk;  // after grouping: the number of holders of each chunk, and one more
};

// Makes chunks from the rows of one class of keys: equal rows of several ranks become one chunk with several holders.
// One thread uses one Grouping for many classes. Several Groupings may work on different classes of the same rows at a
// time.
class Grouping {
 public:
  Grouping(const Layout& layout, Rows& rows, bool covers_all) : layout_(layout), rows_(rows), covers_all_(covers_all) {}

  // Returns the number of chunks of the class. If the rows do not fit together, writes the reason to `fault`.
  uint32_t group(uint32_t number, std::string& fault);

 private:
  void sort(uint64_t* places, Holder* holders, int64_t* dims, size_t rows, size_t words);

  struct Ordered {
    uint64_t place;
    uint32_t row;
  };

  const Layout& layout_;
  Rows& rows_;
  bool covers_all_;
  std::vector<Ordered> order_;
  std::vector<Holder> holders_copy_;
  std::vector<int64_t> dims_copy_;
};

std::vector<uint32_t> ranks_of(const Holder* begin, const Holder* end) {
  std::vector<uint32_t> ranks;
  for (const Holder* holder = begin; holder != end; ++holder) ranks.push_back(holder->rank);
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  return ranks;
}

void Grouping::sort(uint64_t* places, Holder* holders, int64_t* dims, size_t rows, size_t words) {
  if (std::is_sorted(places, places + rows)) return;
  order_.resize(rows);
  for (size_t row = 0; row < rows; ++row) order_[row] = {places[row], static_cast<uint32_t>(row)};
  std::sort(order_.begin(), order_.end(),
            [](const Ordered& a, const Ordered& b) { return a.place != b.place ? a.place < b.place : a.row < b.row; });
  holders_copy_.assign(holders, holders + rows);
  dims_copy_.assign(dims, dims + rows * words);
  for (size_t i = 0; i < rows; ++i) {
    const size_t row = order_[i].row;
    places[i] = order_[i].place;
    holders[i] = holders_copy_[row];
    std::copy_n(dims_copy_.data() + row * words, words, dims + i * words);
  }
}

uint32_t Grouping::group(uint32_t number, std::string& fault) {
  const Layout::Class& facts = layout_.classes[number];
  const uint64_t base = rows_.begin[number];
  const size_t words = 2 * size_t{facts.ndim};
  uint64_t* places = rows_.places.data() + base;
  Holder* holders = rows_.holders.data() + base;
  int64_t* dims = rows_.dims.data() + rows_.dims_begin[number];
  uint32_t* counts = rows_.holders_of_chunk.data() + base;
  size_t rows = rows_.begin[number + 1] - base;
  sort(places, holders, dims, rows, words);

  const Boxes chunks{dims, facts.ndim};
  const auto text = [&](size_t chunk, const Holder* from, const Holder* to) {
    const std::span<const int64_t> offset(chunks.offset(chunk), facts.ndim), size(chunks.size(chunk), facts.ndim);
    const std::vector<uint32_t> ranks = ranks_of(from, to);
    return ranks_text(ranks) + (ranks.size() == 1 ? " has" : " have") + " offset " + tuple_text(offset) + " of size " +
           tuple_text(size);
  };
  const bool empty = places[0] == kEmptyChunk;
  if (!empty) {  // drops the empty chunks
    while (places[rows - 1] == kEmptyChunk) --rows;
  }

  uint32_t count = 0;
  size_t kept = 0;  // number of holders that are kept
  for (size_t row = 0; row < rows; ++row) {
    const int64_t* chunk = dims + row * words;
    if (row > 0 && places[row] == places[row - 1]) {
      const bool equal = std::equal(chunk, chunk + words, dims + (count - 1) * words);
      if (!equal && empty) continue;
      if (!equal) {
        fault = text(count - 1, holders + kept - counts[count - 1], holders + kept) + ", " +
                text(row, holders + row, holders + row + 1) + ": they overlap";
        return 0;
      }
      if (holders[row].rank == holders[kept - 1].rank) {
        if (empty) continue;
        fault = (facts.kind == state::ItemKind::object ? "rank " + std::to_string(holders[row].rank) + " has it"
                                                       : text(row, holders + row, holders + row + 1)) +
                " twice";
        return 0;
      }
      ++counts[count - 1];
    } else {
      std::copy(chunk, chunk + words, dims + count * words);
      counts[count++] = 1;
    }
    holders[kept++] = holders[row];
  }
  if (facts.kind == state::ItemKind::object) return count;

  const Tiling tiling = check_tiling(layout_.shape(facts), chunks, empty ? 0 : count);
  if (tiling.overlap) {
    const auto holders_text = [&](size_t chunk) {
      const Holder* from = holders;
      for (size_t before = 0; before < chunk; ++before) from += counts[before];
      return text(chunk, from, from + counts[chunk]);
    };
    fault = holders_text(tiling.overlap->first) + ", " + holders_text(tiling.overlap->second) + ": they overlap";
    return 0;
  }
  if (tiling.missing > 0 && covers_all_) {
    const bool exact = !tiling.hole_size.empty();
    fault = std::to_string(tiling.missing) + " elements are held by no rank" +
            (exact ? ", such as those at offset " + tuple_text(tiling.hole_offset) + " of size " +
                         tuple_text(tiling.hole_size)
                   : "") +
            " (" + ranks_text(ranks_of(holders, holders + kept)) + " hold the rest)";
    return 0;
  }
  return count;
}

class Merge {
 public:
  Merge(std::span<const state::Inventory> ranks, unsigned threads) : ranks_(ranks), threads_(threads) {
    find_classes(ranks_, layout);
    make_room();
    gather();
    group();
    rows_.places = {};
    pack();
  }

  Layout layout;

 private:
  void make_room();
  void gather();
  void group();
  void pack();
  uint32_t class_of(const Layout::Block& block, uint32_t slot) const {
    return layout.class_of[layout.keys(block)[block.slot_items[slot]]];
  }
  std::string misfit(uint32_t number) const;
  std::string_view name(uint32_t number) const { return layout.names[layout.classes[number].first_key]; }

  std::span<const state::Inventory> ranks_;
  unsigned threads_;
  Rows rows_;
};

void Merge::make_room() {
  const size_t classes = layout.classes.size();
  std::vector<uint64_t> counts(classes);
  for (const Layout::Block& block : layout.blocks) {
    for (uint32_t slot = 0; slot < block.slot_items.size(); ++slot) counts[class_of(block, slot)] += block.ranks;
  }
  rows_.begin.reserve(classes + 1);
  rows_.dims_begin.reserve(classes);
  uint64_t rows = 0, words = 0;
  for (size_t number = 0; number < classes; ++number) {
    rows_.begin.push_back(rows);
    rows_.dims_begin.push_back(words);
    rows += counts[number];
    words += counts[number] * 2 * layout.classes[number].ndim;
  }
  rows_.begin.push_back(rows);
  if (rows >= UINT32_MAX) throw Error::invalid("the ranks have more than 4 billion different items together");
  rows_.places.resize(rows);
  rows_.holders.resize(rows);
  rows_.dims.resize(words);
  rows_.holders_of_chunk.resize(rows + 1);
}

// Collects rows rank after rank, so that memory is read in order. Each thread has some ranks, and knows where their
// rows start in each class.
void Merge::gather() {
  const size_t classes = layout.classes.size();
  const size_t slices = std::max<size_t>(1, std::min<size_t>(threads_, ranks_.size()));
  std::vector<uint8_t> sound(classes);
  for (size_t number = 0; number < classes; ++number) {
    const Layout::Class& facts = layout.classes[number];
    sound[number] = facts.kind == state::ItemKind::object || shape_bytes(layout.shape(facts), facts.bytes).has_value();
  }
  const auto first_rank = [&](size_t slice) { return ranks_.size() * slice / slices; };
  std::vector<std::vector<uint64_t>> starts(slices);
  starts[0] = {rows_.begin.begin(), rows_.begin.end() - 1};
  for (size_t slice = 1; slice < slices; ++slice) {
    starts[slice] = starts[slice - 1];
    std::vector<uint32_t> ranks_of_block(layout.blocks.size());
    for (size_t rank = first_rank(slice - 1); rank < first_rank(slice); ++rank) ++ranks_of_block[layout.block_of[rank]];
    for (size_t i = 0; i < layout.blocks.size(); ++i) {
      if (ranks_of_block[i] == 0) continue;
      const Layout::Block& block = layout.blocks[i];
      for (uint32_t slot = 0; slot < block.slot_items.size(); ++slot) {
        starts[slice][class_of(block, slot)] += ranks_of_block[i];
      }
    }
  }

  std::vector<std::vector<uint32_t>> misfits(slices);
  parallel_for(threads_, slices, 1, [&] {
    return [&](size_t slice) {
      std::vector<uint64_t>& next = starts[slice];
      for (size_t rank = first_rank(slice); rank < first_rank(slice + 1); ++rank) {
        const Layout::Block& block = layout.block(rank);
        for (uint32_t slot = 0; slot < block.slot_items.size(); ++slot) {
          const uint32_t number = class_of(block, slot);
          const Layout::Class& facts = layout.classes[number];
          const state::Item item = ranks_[rank][block.slot_items[slot]];
          const std::optional<uint64_t> place =
              sound[number] ? place_of(item, facts, layout.shape(facts)) : std::nullopt;
          if (!place) {
            misfits[slice].push_back(number);
            continue;
          }
          const uint64_t row = next[number]++;
          rows_.places[row] = *place;
          rows_.holders[row] = {static_cast<uint32_t>(rank), slot};
          int64_t* words = rows_.dims.data() + rows_.dims_begin[number] + (row - rows_.begin[number]) * 2 * facts.ndim;
          std::copy(item.offset.begin(), item.offset.end(), words);
          std::copy(item.size.begin(), item.size.end(), words + facts.ndim);
        }
      }
    };
  });

  std::vector<uint32_t> all;
  for (const auto& some : misfits) all.insert(all.end(), some.begin(), some.end());
  std::sort(all.begin(), all.end());
  all.erase(std::unique(all.begin(), all.end()), all.end());
  if (all.empty()) return;
  Faults faults(layout);
  for (size_t i = 0; i < all.size(); ++i) faults.note(all[i], i == 0 ? misfit(all[0]) : std::string());
  faults.raise();
}

std::string Merge::misfit(uint32_t number) const {
  std::vector<RankRow> rows;
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    const Layout::Block& block = layout.block(rank);
    for (uint32_t slot = 0; slot < block.slot_items.size(); ++slot) {
      if (class_of(block, slot) == number) rows.push_back({rank, ranks_[rank][block.slot_items[slot]]});
    }
  }
  const Layout::Class& facts = layout.classes[number];
  return explain_misfit(name(number), rows, facts, layout.shape(facts));
}

void Merge::group() {
  Faults faults(layout);
  parallel_for(threads_, layout.classes.size(), 1, [&] {
    return [&, grouping = Grouping(layout, rows_, ranks_.size() > 1)](size_t index) mutable {
      const auto number = static_cast<uint32_t>(index);
      std::string fault;
      layout.classes[number].chunks = grouping.group(number, fault);
      if (!fault.empty()) faults.note(number, std::string(name(number)) + ": " + fault);
    };
  });
  faults.raise();
}

// Closes the gaps behind each class's chunks and holders, in place: a class has fewer chunks than rows.
void Merge::pack() {
  uint64_t chunks = 0, holders = 0, words = 0;
  for (size_t i = 0; i < layout.classes.size(); ++i) {
    Layout::Class& of = layout.classes[i];
    const auto from = static_cast<ptrdiff_t>(rows_.begin[i]);
    of.first_chunk = chunks;
    of.dims = words;
    uint64_t all = 0;
    for (uint32_t chunk = 0; chunk < of.chunks; ++chunk) {
      const uint32_t count = rows_.holders_of_chunk[rows_.begin[i] + chunk];
      rows_.holders_of_chunk[chunks++] = static_cast<uint32_t>(holders + all);
      all += count;
    }
    std::copy_n(rows_.holders.begin() + from, all, rows_.holders.begin() + static_cast<ptrdiff_t>(holders));
    holders += all;
    const uint64_t length = uint64_t{of.chunks} * 2 * of.ndim;
    std::copy_n(rows_.dims.begin() + static_cast<ptrdiff_t>(rows_.dims_begin[i]), length,
                rows_.dims.begin() + static_cast<ptrdiff_t>(words));
    words += length;
  }
  rows_.holders_of_chunk[chunks] = static_cast<uint32_t>(holders);
  const auto take = [](auto& from, uint64_t count, auto& to) {
    to = std::move(from);
    to.resize(count);
    if (count < to.capacity() / 2) to.shrink_to_fit();
  };
  take(rows_.holders, holders, layout.holders);
  take(rows_.dims, words, layout.dims);
  take(rows_.holders_of_chunk, chunks + 1, layout.first_holder);
}

}  // namespace

Layout merge(std::span<const state::Inventory> ranks, unsigned threads) {
  return std::move(Merge(ranks, threads).layout);
}

}  // namespace vescale_ckpt::plan
