#include "plan/merge.h"

#include <algorithm>
#include <mutex>
#include <string>
#include <unordered_map>

#include "base/error.h"
#include "base/parallel.h"
#include "format/torch_record.h"
#include "plan/group.h"
#include "plan/row_check.h"

namespace vescale_ckpt::plan {
namespace {

constexpr uint32_t kNone = UINT32_MAX;

// What is wrong with the first key that has something wrong, whichever thread saw it.
class Faults {
 public:
  void note(uint32_t key, std::string text) {
    const std::lock_guard lock(mutex_);
    ++keys_;
    if (key >= first_) return;
    first_ = key;
    text_ = std::move(text);
  }
  void raise() const {
    if (keys_ == 0) return;
    const std::string more = keys_ > 1 ? " (and " + std::to_string(keys_ - 1) + " more keys have faults)" : "";
    throw Error::invalid(text_ + more);
  }

 private:
  std::mutex mutex_;  // guards all below
  uint32_t first_ = kNone;
  size_t keys_ = 0;
  std::string text_;
};

class Merge {
 public:
  Merge(std::span<const state::Inventory> ranks, std::span<const Hash128> names, unsigned threads)
      : ranks_(ranks), threads_(threads) {
    intern(names);
    make_room();
    gather();
    group();
    rows_.places = {};
    pack();
  }

  Layout layout;

 private:
  // Ranks of equal names, as a mesh has many.
  struct Block {
    std::vector<uint32_t> keys;  // of each item
    uint32_t ranks = 0;
  };

  void intern(std::span<const Hash128> names);
  void make_room();
  void gather();
  void group();
  void pack();
  void add_key(const state::Item& item);
  std::string misfit(uint32_t key) const;

  const Block& block(uint32_t rank) const { return blocks_[block_of_[rank]]; }

  std::span<const state::Inventory> ranks_;
  unsigned threads_;
  std::vector<Block> blocks_;
  std::vector<uint32_t> block_of_;  // of each rank
  Rows rows_;
};

void Merge::intern(std::span<const Hash128> names) {
  struct Hash {
    size_t operator()(const Hash128& hash) const { return hash[0]; }
  };
  std::unordered_map<Hash128, uint32_t, Hash> known;
  block_of_.reserve(ranks_.size());
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    const auto [found, fresh] = known.try_emplace(names[rank], static_cast<uint32_t>(blocks_.size()));
    if (fresh) {
      const state::Inventory& inventory = ranks_[rank];
      Block& block = blocks_.emplace_back();
      block.keys.reserve(inventory.size());
      for (size_t i = 0; i < inventory.size(); ++i) {
        const state::Item item = inventory[i];
        const auto [key, is_new] = layout.names.add(item.name);
        if (is_new) add_key(item);
        block.keys.push_back(key);
      }
    }
    block_of_.push_back(found->second);
    ++blocks_[found->second].ranks;
  }
}

void Merge::add_key(const state::Item& item) {
  const bool object = item.kind == state::ItemKind::object;
  layout.keys.push_back({.kind = item.kind,
                         .dtype = item.dtype,
                         .flags = item.flags,
                         .ndim = static_cast<uint32_t>(item.shape.size()),
                         .boxes = 0,
                         .first_box = 0,
                         .shape = layout.shapes.size(),
                         .dims = 0,
                         .bytes = object ? item.bytes : format::dtypes()[item.dtype].item_bytes});
  layout.shapes.insert(layout.shapes.end(), item.shape.begin(), item.shape.end());
}

void Merge::make_room() {
  const size_t keys = layout.keys.size();
  std::vector<uint64_t> counts(keys);
  for (const Block& block : blocks_) {
    for (const uint32_t key : block.keys) counts[key] += block.ranks;
  }
  rows_.begin.reserve(keys + 1);
  rows_.dims_begin.reserve(keys);
  uint64_t rows = 0, words = 0;
  for (size_t key = 0; key < keys; ++key) {
    rows_.begin.push_back(rows);
    rows_.dims_begin.push_back(words);
    rows += counts[key];
    words += counts[key] * 2 * layout.keys[key].ndim;
  }
  rows_.begin.push_back(rows);
  if (rows >= UINT32_MAX) throw Error::invalid("the ranks have more than 4 billion items together");
  rows_.places.resize(rows);
  rows_.holders.resize(rows);
  rows_.dims.resize(words);
  rows_.holders_of_box.resize(rows + 1);
}

// Rank after rank, so that memory is read in its order; each thread has some ranks, and knows where in each key's rows
// theirs start.
void Merge::gather() {
  const size_t keys = layout.keys.size(), slices = std::max<size_t>(1, std::min<size_t>(threads_, ranks_.size()));
  std::vector<uint8_t> sound(keys);
  for (size_t key = 0; key < keys; ++key) {
    const Layout::Key& facts = layout.keys[key];
    sound[key] = facts.kind == state::ItemKind::object || shape_bytes(layout.shape(facts), facts.bytes).has_value();
  }
  const auto first_rank = [&](size_t slice) { return ranks_.size() * slice / slices; };
  std::vector<std::vector<uint64_t>> starts(slices);
  starts[0] = {rows_.begin.begin(), rows_.begin.end() - 1};
  for (size_t slice = 1; slice < slices; ++slice) {
    starts[slice] = starts[slice - 1];
    std::vector<uint32_t> ranks_of_block(blocks_.size());
    for (size_t rank = first_rank(slice - 1); rank < first_rank(slice); ++rank) ++ranks_of_block[block_of_[rank]];
    for (size_t i = 0; i < blocks_.size(); ++i) {
      if (ranks_of_block[i] == 0) continue;
      for (const uint32_t key : blocks_[i].keys) starts[slice][key] += ranks_of_block[i];
    }
  }

  std::vector<std::vector<uint32_t>> misfits(slices);
  parallel_for(threads_, slices, 1, [&] {
    return [&](size_t slice) {
      std::vector<uint64_t>& next = starts[slice];
      for (size_t rank = first_rank(slice); rank < first_rank(slice + 1); ++rank) {
        const std::vector<uint32_t>& translation = block(static_cast<uint32_t>(rank)).keys;
        for (size_t i = 0; i < translation.size(); ++i) {
          const uint32_t key = translation[i];
          const Layout::Key& facts = layout.keys[key];
          const state::Item item = ranks_[rank][i];
          const std::optional<uint64_t> place = sound[key] ? place_of(item, facts, layout.shape(facts)) : std::nullopt;
          if (!place) {
            misfits[slice].push_back(key);
            continue;
          }
          const uint64_t row = next[key]++;
          rows_.places[row] = *place;
          rows_.holders[row] = {static_cast<uint32_t>(rank), static_cast<uint32_t>(i)};
          int64_t* words = rows_.dims.data() + rows_.dims_begin[key] + (row - rows_.begin[key]) * 2 * facts.ndim;
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
  Faults faults;
  for (size_t i = 0; i < all.size(); ++i) faults.note(all[i], i == 0 ? misfit(all[0]) : std::string());
  faults.raise();
}

std::string Merge::misfit(uint32_t key) const {
  std::vector<RankRow> rows;
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    const std::vector<uint32_t>& translation = block(rank).keys;
    for (size_t i = 0; i < translation.size(); ++i) {
      if (translation[i] == key) rows.push_back({rank, ranks_[rank][i]});
    }
  }
  const Layout::Key& facts = layout.keys[key];
  return explain_misfit(layout.names[key], rows, facts, layout.shape(facts));
}

void Merge::group() {
  Faults faults;
  parallel_for(threads_, layout.keys.size(), 1, [&] {
    return [&, grouping = Grouping(layout, rows_, ranks_.size() > 1)](size_t index) mutable {
      const auto key = static_cast<uint32_t>(index);
      std::string fault;
      layout.keys[key].boxes = grouping.group(key, fault);
      if (!fault.empty()) faults.note(key, std::string(layout.names[key]) + ": " + fault);
    };
  });
  faults.raise();
}

// Closes the gaps behind each key's boxes and holders, where they are: what was one row a rank becomes one a box.
void Merge::pack() {
  uint64_t boxes = 0, holders = 0, words = 0;
  for (size_t i = 0; i < layout.keys.size(); ++i) {
    Layout::Key& key = layout.keys[i];
    const auto from = static_cast<ptrdiff_t>(rows_.begin[i]);
    key.first_box = boxes;
    key.dims = words;
    uint64_t all = 0;
    for (uint32_t box = 0; box < key.boxes; ++box) {
      const uint32_t count = rows_.holders_of_box[rows_.begin[i] + box];
      rows_.holders_of_box[boxes++] = static_cast<uint32_t>(holders + all);
      all += count;
    }
    std::copy_n(rows_.holders.begin() + from, all, rows_.holders.begin() + static_cast<ptrdiff_t>(holders));
    holders += all;
    const uint64_t length = uint64_t{key.boxes} * 2 * key.ndim;
    std::copy_n(rows_.dims.begin() + static_cast<ptrdiff_t>(rows_.dims_begin[i]), length,
                rows_.dims.begin() + static_cast<ptrdiff_t>(words));
    words += length;
  }
  rows_.holders_of_box[boxes] = static_cast<uint32_t>(holders);
  const auto take = [](auto& from, uint64_t count, auto& to) {
    to = std::move(from);
    to.resize(count);
    if (count < to.capacity() / 2) to.shrink_to_fit();
  };
  take(rows_.holders, holders, layout.holders);
  take(rows_.dims, words, layout.dims);
  take(rows_.holders_of_box, boxes + 1, layout.first_holder);
}

}  // namespace

Layout merge(std::span<const state::Inventory> ranks, std::span<const Hash128> names, unsigned threads) {
  return std::move(Merge(ranks, names, threads).layout);
}

}  // namespace vescale_ckpt::plan
