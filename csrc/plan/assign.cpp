#include "plan/assign.h"

#include <algorithm>
#include <cstddef>

#include "base/error.h"
#include "plan/balance.h"
#include "plan/holder_sets.h"

namespace vescale_ckpt::plan {
namespace {

constexpr int64_t kMostBytes = int64_t{1} << 61;  // in all: sums of loads stay far from overflow

// Calls body(key, box, holders) for every box, once for each group of holders of whom one is to write it.
template <typename Body>
void for_each_group(Layout& layout, std::span<const uint32_t> nodes, Placement placement, const Body& body) {
  for (uint32_t number = 0; number < layout.keys.size(); ++number) {
    const Layout::Key& key = layout.keys[number];
    for (size_t box = 0; box < key.boxes; ++box) {
      const std::span<const Holder> holders = layout.holders_of(key, box);
      if (placement != Placement::local) {
        body(number, box, holders);
        continue;
      }
      for (size_t begin = 0, end = 0; begin < holders.size(); begin = end) {
        const uint32_t node = nodes[holders[begin].rank];
        for (end = begin + 1; end < holders.size() && nodes[holders[end].rank] == node;) ++end;
        body(number, box, holders.subspan(begin, end - begin));
      }
    }
  }
}

void sort_by_node(Layout& layout, std::span<const uint32_t> nodes) {
  const auto before = [&](const Holder& a, const Holder& b) {
    return nodes[a.rank] != nodes[b.rank] ? nodes[a.rank] < nodes[b.rank] : a.rank < b.rank;
  };
  for (const Layout::Key& key : layout.keys) {
    for (size_t box = 0; box < key.boxes; ++box) {
      const std::span<Holder> holders = layout.holders_of(key, box);
      if (!std::is_sorted(holders.begin(), holders.end(), before)) std::sort(holders.begin(), holders.end(), before);
    }
  }
}

const Holder& holder_of(std::span<const Holder> holders, uint32_t rank) {
  return *std::lower_bound(holders.begin(), holders.end(), rank,
                           [](const Holder& holder, uint32_t value) { return holder.rank < value; });
}

// Two balances: of bytes, and of the number of what has none as far as anybody knows (an object never saved, an empty
// tensor). The contested boxes of each stand in the order of for_each_group.
class Assigner {
 public:
  Assigner(Layout& layout, std::span<const uint32_t> nodes, const PlanOptions& options)
      : layout_(layout), nodes_(nodes), options_(options) {}

  Assignment run() {
    if (options_.placement == Placement::local) sort_by_node(layout_, nodes_);
    if (options_.placement == Placement::lowest_rank) return emit(nullptr, nullptr);
    std::vector<int64_t> bytes(nodes_.size()), numbers(nodes_.size());
    collect(bytes, numbers);
    Balance by_bytes(sets_, std::move(bytes), options_.least_piece_bytes);
    Balance by_number(sets_, std::move(numbers), 1);
    by_bytes.place(sized_);
    by_number.place(weightless_);
    return emit(&by_bytes, &by_number);
  }

 private:
  void collect(std::vector<int64_t>& bytes, std::vector<int64_t>& numbers);
  Assignment emit(const Balance* by_bytes, const Balance* by_number) const;

  Layout& layout_;
  std::span<const uint32_t> nodes_;
  const PlanOptions& options_;
  HolderSets sets_;
  std::vector<SharedPiece> sized_, weightless_;
};

void Assigner::collect(std::vector<int64_t>& bytes, std::vector<int64_t>& numbers) {
  uint64_t total = 0;
  std::vector<bool> whole(layout_.keys.size());
  for (const std::string& name : options_.whole) {
    if (const auto number = layout_.names.find(name)) whole[*number] = true;
  }
  for_each_group(layout_, nodes_, options_.placement,
                 [&](uint32_t number, size_t box, std::span<const Holder> holders) {
                   const Layout::Key& key = layout_.keys[number];
                   const uint64_t weight = layout_.bytes(key, box);
                   if (weight > kMostBytes || (total += weight) > kMostBytes) {
                     throw Error::invalid("the ranks have more bytes together than can be counted");
                   }
                   if (holders.size() == 1) {
                     bytes[holders[0].rank] += static_cast<int64_t>(weight);
                     numbers[holders[0].rank] += weight == 0;
                     return;
                   }
                   const bool uncut = weight == 0 || whole[number];
                   (weight == 0 ? weightless_ : sized_)
                       .push_back({.set = sets_.add(holders),
                                   .bytes = std::max<int64_t>(1, static_cast<int64_t>(weight)),
                                   .size = uncut ? std::span<const int64_t>() : layout_.size(key, box)});
                 });
}

Assignment Assigner::emit(const Balance* by_bytes, const Balance* by_number) const {
  Assignment result;
  result.pieces.reserve(layout_.first_holder.size() - 1);
  result.first_piece.reserve(layout_.first_holder.size());
  size_t sized = 0, weightless = 0;
  for_each_group(layout_, nodes_, options_.placement,
                 [&](uint32_t number, size_t box, std::span<const Holder> holders) {
                   const Layout::Key& key = layout_.keys[number];
                   if (result.first_piece.size() == key.first_box + box) {
                     result.first_piece.push_back(static_cast<uint32_t>(result.pieces.size()));
                   }
                   if (holders.size() == 1 || by_bytes == nullptr) {
                     result.pieces.push_back({holders[0].rank, holders[0].item, 0, 0});
                     return;
                   }
                   const auto [dim, shares] =
                       layout_.bytes(key, box) == 0 ? by_number->shares(weightless++) : by_bytes->shares(sized++);
                   for (const Share& share : shares) {
                     uint32_t split = 0;
                     if (dim >= 0) {
                       result.splits.push_back({share.start, share.length, dim});
                       split = static_cast<uint32_t>(result.splits.size());
                     }
                     result.pieces.push_back({share.rank, holder_of(holders, share.rank).item, 0, split});
                   }
                 });
  if (result.pieces.size() >= UINT32_MAX) throw Error::invalid("the ranks write more than 4 billion items together");
  result.first_piece.push_back(static_cast<uint32_t>(result.pieces.size()));
  return result;
}

}  // namespace

Assignment assign(Layout& layout, std::span<const uint32_t> nodes, const PlanOptions& options) {
  return Assigner(layout, nodes, options).run();
}

}  // namespace vescale_ckpt::plan
