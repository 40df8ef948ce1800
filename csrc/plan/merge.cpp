#include <algorithm>
#include <mutex>
#include <string>

#include "base/error.h"
#include "base/parallel.h"
#include "plan/classes.h"
#include "plan/group.h"
#include "plan/layout.h"
#include "plan/row_check.h"

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
