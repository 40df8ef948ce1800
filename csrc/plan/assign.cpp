#include "plan/assign.h"

#include <algorithm>
#include <cstddef>

#include "base/error.h"
#include "plan/balance.h"

namespace vescale_ckpt::plan {
namespace {

constexpr uint64_t kMostBytes = uint64_t{1} << 61;  // a limit for all bytes, so that sums of loads cannot overflow

void sort_by_node(Layout& layout, std::span<const uint32_t> nodes) {
  const auto before = [&](const Holder& a, const Holder& b) {
    return nodes[a.rank] != nodes[b.rank] ? nodes[a.rank] < nodes[b.rank] : a.rank < b.rank;
  };
  for (const Layout::Class& of : layout.classes) {
    for (size_t chunk = 0; chunk < of.chunks; ++chunk) {
      const std::span<Holder> holders = layout.holders_of(of, chunk);
      if (!std::is_sorted(holders.begin(), holders.end(), before)) std::sort(holders.begin(), holders.end(), before);
    }
  }
}

// Balances bytes. An object and an empty tensor count as one.
class Assigner {
 public:
  Assigner(Layout& layout, std::span<const uint32_t> nodes, const std::vector<bool>& whole, const PlanOptions& options)
      : layout_(layout), nodes_(nodes), whole_(whole), options_(options) {}

  Assignment run() {
    if (options_.placement == Placement::local) sort_by_node(layout_, nodes_);
    group();
    share();
    return std::move(result_);
  }

 private:
  // A chunk of one class.
  struct Shared {
    uint32_t chunk;
    uint32_t set;     // set of ranks
    uint64_t weight;  // bytes
  };

  void group();
  void add_group(const Layout::Class& of, uint32_t chunk, uint64_t weight, std::span<const Holder> holders);
  void share();
  std::span<const Shared> shared_of(uint32_t number) const {
    const uint32_t* first = result_.first_shared_chunk.data() + number;
    return std::span(shared_).subspan(first[0], first[1] - first[0]);
  }

  Layout& layout_;
  std::span<const uint32_t> nodes_;
  const std::vector<bool>& whole_;
  const PlanOptions& options_;
  HolderSets sets_;
  std::vector<int64_t> bytes_;  // what each rank alone can write
  std::vector<Shared> shared_;  // class after class
  Assignment result_;
};

void Assigner::group() {
  bytes_.resize(nodes_.size());
  uint64_t slots = 0;
  for (size_t rank = 0; rank < nodes_.size(); ++rank) {
    result_.first_slot.push_back(slots);
    slots += layout_.block(rank).slot_items.size();
  }
  result_.group_of.resize(slots, Assignment::kNoGroup);
  result_.groups.reserve(layout_.first_holder.size() - 1);
  result_.first_group.reserve(layout_.first_holder.size());
  uint64_t total = 0;
  for (const Layout::Class& of : layout_.classes) {
    result_.first_shared_chunk.push_back(static_cast<uint32_t>(shared_.size()));
    for (uint32_t chunk = 0; chunk < of.chunks; ++chunk) {
      result_.first_group.push_back(static_cast<uint32_t>(result_.groups.size()));
      const std::span<const Holder> holders = layout_.holders_of(of, chunk);
      const uint64_t weight = layout_.bytes(of, chunk);
      for (size_t begin = 0, end = 0; begin < holders.size(); begin = end) {
        end = holders.size();
        if (options_.placement == Placement::local) {
          const uint32_t node = nodes_[holders[begin].rank];
          for (end = begin + 1; end < holders.size() && nodes_[holders[end].rank] == node;) ++end;
        }
        if (options_.placement != Placement::lowest_rank) {
          if (weight > (kMostBytes - total) / of.keys) {
            throw Error::invalid("the ranks have more bytes together than can be counted");
          }
          total += weight * of.keys;
        }
        add_group(of, chunk, weight, holders.subspan(begin, end - begin));
      }
    }
  }
  if (result_.groups.size() >= UINT32_MAX) throw Error::invalid("the ranks write more than 4 billion items together");
  result_.first_group.push_back(static_cast<uint32_t>(result_.groups.size()));
  result_.first_shared_chunk.push_back(static_cast<uint32_t>(shared_.size()));
}

void Assigner::add_group(const Layout::Class& of, uint32_t chunk, uint64_t weight, std::span<const Holder> holders) {
  const auto number = static_cast<uint32_t>(result_.groups.size());
  const auto take = [&](const Holder& holder) {
    result_.group_of[result_.first_slot[holder.rank] + holder.slot] = number;
  };
  if (holders.size() == 1 || options_.placement == Placement::lowest_rank) {
    const uint32_t writer = holders[0].rank;
    take(holders[0]);
    result_.groups.push_back({writer, 0});
    if (options_.placement == Placement::lowest_rank) return;
    bytes_[writer] += static_cast<int64_t>(weight * of.keys);
    return;
  }
  std::for_each(holders.begin(), holders.end(), take);
  const auto shared = static_cast<uint32_t>(shared_.size() - result_.first_shared_chunk.back());
  result_.groups.push_back({Assignment::Group::kByKey, shared});
  shared_.push_back({chunk, sets_.add(holders), weight});
}

void Assigner::share() {
  std::vector<SharedChunk> chunks;
  for (uint32_t key = 0; key < layout_.class_of.size(); ++key) {
    const uint32_t number = layout_.class_of[key];
    for (const Shared& shared : shared_of(number)) {
      const std::span<const int64_t> size = layout_.size(layout_.classes[number], shared.chunk);
      const bool marked = layout_.classes[number].flags & state::kUncut;
      const bool uncut = shared.weight == 0 || whole_[key] || marked;
      chunks.push_back({.set = shared.set,
                        .bytes = std::max<int64_t>(1, static_cast<int64_t>(shared.weight)),
                        .size = uncut ? std::span<const int64_t>() : size});
    }
  }
  Balance balance(sets_, std::move(bytes_), options_.least_piece_bytes);
  balance.place(chunks);

  result_.pieces.reserve(chunks.size());
  result_.first_piece.reserve(chunks.size() + 1);
  result_.first_shared.reserve(layout_.class_of.size());
  size_t next = 0;
  for (const uint32_t number : layout_.class_of) {
    result_.first_shared.push_back(result_.first_piece.size());
    for (size_t i = 0; i < shared_of(number).size(); ++i) {
      result_.first_piece.push_back(result_.pieces.size());
      const auto [dim, shares] = balance.shares(next++);
      for (const Share& share : shares) {
        uint32_t split = 0;
        if (dim >= 0) {
          result_.splits.push_back({share.start, share.length, dim});
          split = static_cast<uint32_t>(result_.splits.size());
        }
        result_.pieces.push_back({share.rank, split});
      }
    }
  }
  if (result_.splits.size() >= UINT32_MAX) throw Error::invalid("the ranks write more than 4 billion pieces together");
  result_.first_piece.push_back(result_.pieces.size());
}

}  // namespace

Assignment assign(Layout& layout, std::span<const uint32_t> nodes, const std::vector<bool>& whole,
                  const PlanOptions& options) {
  return Assigner(layout, nodes, whole, options).run();
}

}  // namespace vescale_ckpt::plan
