#include "share/relays.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "base/append.h"
#include "base/error.h"
#include "share/relay_tree.h"
#include "share/route_readers.h"

namespace vescale_ckpt::share {
namespace {

// A plan is words: the number of rounds; then for each group of ranks the number of words that follow, and
//   runs of nodes: of all ranks, in order: node, how many ranks
//   replicas: runs of ranks: first, step, how many
//   sets: replicas
//   bundles: set, round, reader's node in the set, turn, whether the tree is mirrored, bytes, and pieces:
//     offset in the bundle, dimensions n, n offsets in the chunk, n sizes, rows: replicas, where in their table
// Before all that is repeated stands its number.

using Words = std::vector<int64_t>;

// Ranks of a set, by their nodes. Nodes are numbered from 0.
struct Members {
  std::vector<uint32_t> nodes, ranks;
  std::vector<size_t> begins;  // in `ranks`, of each node, and an end

  Members(std::vector<uint32_t> all, std::span<const uint32_t> node_of) : ranks(std::move(all)) {
    std::ranges::sort(ranks, {}, [&](uint32_t rank) { return std::pair(node_of[rank], rank); });
    for (size_t i = 0; i < ranks.size(); ++i) {
      if (i != 0 && node_of[ranks[i]] == nodes.back()) continue;
      nodes.push_back(node_of[ranks[i]]);
      begins.push_back(i);
    }
    begins.push_back(ranks.size());
  }

  std::span<const uint32_t> on_node(size_t node) const {
    return std::span(ranks).subspan(begins[node], begins[node + 1] - begins[node]);
  }
  // The rank that holds a bundle for its node.
  uint32_t holder(size_t node, uint64_t turn) const { return on_node(node)[turn % on_node(node).size()]; }
  // The node of a rank, and a turn in which it is the holder.
  std::pair<size_t, uint64_t> place_of(uint32_t rank, std::span<const uint32_t> node_of) const {
    const auto node = static_cast<size_t>(std::ranges::lower_bound(nodes, node_of[rank]) - nodes.begin());
    return {node, std::ranges::lower_bound(on_node(node), rank) - on_node(node).begin()};
  }
};

struct Bundle {
  size_t set = 0, round = 0, root = 0;
  uint64_t turn = 0;
  bool mirrored = false;
  uint64_t bytes = 0;
  std::vector<std::pair<uint64_t, Piece>> pieces;  // with their offsets
};

// Cuts large pieces, so that both trees get bundles of them.
void cut_large(std::vector<Piece>& pieces) {
  constexpr uint64_t kCount = 16, kLeast = 1 << 20;  // smaller ones would read blocks of checksums twice too often
  std::map<uint32_t, uint64_t> total;                // of each set
  for (const Piece& piece : pieces) total[piece.set] += piece.bytes;
  for (size_t i = 0, whole = pieces.size(); i < whole; ++i) {
    const uint64_t most = std::max(kLeast, total[pieces[i].set] / kCount);
    for (uint64_t count = (pieces[i].bytes + most - 1) / most; count > 1; --count) {
      std::optional<Piece> rest = pieces[i].cut(pieces[i].bytes / count);
      if (!rest) break;
      pieces.push_back(std::exchange(pieces[i], std::move(*rest)));
    }
  }
}

// Puts pieces of one set and reader together, which follow each other. The bundles of different readers take turns.
std::vector<Bundle> bundles_of(size_t set, const Members& members, std::span<const uint32_t> node_of,
                               std::span<Piece> pieces, uint64_t limit) {
  std::vector<Bundle> bundles;
  std::map<uint32_t, uint64_t> count;  // of a reader's
  for (Piece& piece : pieces) {
    const auto offset_after = [&](uint64_t end) { return staging_offset(*piece.like, piece.box, false, end); };
    if (bundles.empty() || bundles.back().pieces.front().second.reader != piece.reader ||
        offset_after(bundles.back().bytes) + piece.bytes > limit) {
      Bundle& bundle = bundles.emplace_back();
      bundle.set = set;
      std::tie(bundle.root, bundle.turn) = members.place_of(piece.reader, node_of);
      bundle.round = count[piece.reader]++;
    }
    const uint64_t offset = offset_after(bundles.back().bytes);
    bundles.back().bytes = offset + piece.bytes;
    bundles.back().pieces.emplace_back(offset, std::move(piece));
  }
  std::ranges::stable_sort(bundles, {}, &Bundle::round);
  return bundles;
}

// Gives bundles their rounds and trees.
class Schedule {
 public:
  Schedule(std::span<const uint32_t> node_of, uint64_t budget)
      : budget_(budget), memory_(node_of.size()), sent_(std::ranges::max(node_of) + size_t{1}) {}

  // `bundles`: of each of the sets. Returns all in the order of their rounds.
  std::vector<Bundle> run(std::vector<std::vector<Bundle>> bundles, std::span<const Members> sets) {
    std::vector<Bundle> done;
    std::vector<size_t> next(sets.size()), left(sets.size());
    for (size_t set = 0; set < sets.size(); ++set) left[set] = set;
    for (size_t round = 0; !left.empty(); ++round) {
      std::ranges::fill(memory_, 0);
      for (const size_t set : left) {
        while (next[set] < bundles[set].size() && has_room(sets[set], bundles[set][next[set]])) {
          Bundle& bundle = bundles[set][next[set]];
          ++next[set];
          bundle.round = round;
          place(bundle, sets[set]);
          done.push_back(std::move(bundle));
        }
      }
      std::erase_if(left, [&](size_t set) { return next[set] == bundles[set].size(); });
      if (!left.empty()) std::ranges::rotate(left, left.begin() + 1);  // each is the first some time
    }
    return done;
  }

 private:
  bool has_room(const Members& set, const Bundle& bundle) const {
    for (size_t node = 0; node < set.nodes.size(); ++node) {
      const uint64_t taken = memory_[set.holder(node, bundle.turn)];
      if (taken != 0 && align_up(taken, kPage) + bundle.bytes > budget_) return false;
    }
    return true;
  }

  void place(Bundle& bundle, const Members& set) {
    std::array<uint64_t, 2> sent{};  // by those that would send, so far
    for (size_t node = 0; node < set.nodes.size(); ++node) {
      uint64_t& memory = memory_[set.holder(node, bundle.turn)];
      memory = align_up(memory, kPage) + bundle.bytes;
      for (const bool mirrored : {false, true}) sent[mirrored] += sent_[set.nodes[node]] * sends(mirrored, set, node);
    }
    bundle.mirrored = sent[1] < sent[0];
    for (size_t node = 0; node < set.nodes.size(); ++node) {
      sent_[set.nodes[node]] += bundle.bytes * (sends(bundle.mirrored, set, node) + (node == bundle.root));
    }
  }

  // How many messages a node sends that gets one.
  static uint64_t sends(bool mirrored, const Members& set, size_t node) {
    uint64_t neighbours = 0;
    RelayTree(mirrored, set.nodes.size()).for_each_neighbour(node, [&](uint64_t) { ++neighbours; });
    return neighbours - 1;
  }

  const uint64_t budget_;
  std::vector<uint64_t> memory_;  // of each rank, in the round at hand
  std::vector<uint64_t> sent_;    // by each node
};

void append_number(Words& words, uint64_t number) {
  words.push_back(static_cast<int64_t>(number));
}

void append_nodes(Words& words, std::span<const uint32_t> node_of) {
  Words runs;
  for (const uint32_t node : node_of) {
    if (runs.empty() || runs[runs.size() - 2] != int64_t{node}) append(runs, std::array<int64_t, 2>{node, 0});
    ++runs.back();
  }
  append_number(words, runs.size() / 2);
  append(words, runs);
}

void append_ranks(Words& words, std::span<const uint32_t> ranks) {
  Words runs;
  for (size_t i = 0; i < ranks.size(); ++i) {
    const int64_t rank = ranks[i];
    if (!runs.empty()) {
      const std::span<int64_t, 3> last(runs.end() - 3, 3);
      if (last[2] == 1) last[1] = rank - last[0];
      if (rank == last[0] + last[1] * last[2]) {
        ++last[2];
        continue;
      }
    }
    append(runs, std::array<int64_t, 3>{rank, 0, 1});
  }
  append_number(words, runs.size() / 3);
  append(words, runs);
}

// Words one after another. Throws Error (invalid) at their end.
class Reader {
 public:
  explicit Reader(std::span<const int64_t> words) : words_(words) {}

  bool at_end() const { return words_.empty(); }
  std::span<const int64_t> take(uint64_t count) {
    if (count > words_.size()) throw malformed();
    const auto taken = words_.first(count);
    words_ = words_.subspan(count);
    return taken;
  }
  uint64_t number() { return static_cast<uint64_t>(take(1)[0]); }
  uint64_t number_below(uint64_t end) {
    const uint64_t found = number();
    if (found >= end) throw malformed();
    return found;
  }
  // As many words of `size` numbers as the first one says.
  std::span<const int64_t> rows(uint64_t size) {
    const uint64_t count = number_below(uint64_t{1} << 40);
    return take(size * count);
  }

  static Error malformed() { return Error::invalid("a plan of what nodes pass on is malformed"); }

 private:
  std::span<const int64_t> words_;
};

std::vector<uint32_t> ranks_of(std::span<const int64_t> runs, size_t ranks) {
  std::vector<uint32_t> result;
  for (size_t at = 0; at < runs.size(); at += 3) {
    for (int64_t i = 0; i < runs[at + 2]; ++i) {
      const int64_t rank = runs[at] + i * runs[at + 1];
      if (rank < 0 || static_cast<uint64_t>(rank) >= ranks) throw Reader::malformed();
      result.push_back(static_cast<uint32_t>(rank));
    }
  }
  return result;
}

// Makes the rounds of one rank, from the bundles that concern its node.
class OneRank {
 public:
  OneRank(uint32_t rank, std::span<const int64_t> reads, RankRoutes& routes)
      : rank_(rank), reads_(reads), routes_(routes) {}

  // Takes a group if the rank is in it. Returns whether it is.
  bool take(Reader words) {
    std::vector<uint32_t> node_of;
    const auto nodes = words.rows(2);
    for (size_t at = 0; at < nodes.size(); at += 2) {
      node_of.insert(node_of.end(), static_cast<size_t>(nodes[at + 1]), static_cast<uint32_t>(nodes[at]));
    }
    if (rank_ >= node_of.size()) throw Reader::malformed();
    std::vector<std::vector<uint32_t>> replicas(words.number_below(node_of.size() + 1));
    std::vector<bool> is_near(replicas.size());  // whether some are on this node
    for (size_t i = 0; i < replicas.size(); ++i) {
      replicas[i] = ranks_of(words.rows(3), node_of.size());
      if (std::ranges::find(replicas[i], rank_) != replicas[i].end()) own_ = i;
      is_near[i] = std::ranges::any_of(replicas[i], [&](uint32_t rank) { return node_of[rank] == node_of[rank_]; });
    }
    if (!own_) return false;
    std::vector<std::optional<Members>> sets(words.number_below(uint64_t{1} << 32));
    std::vector<size_t> at_node(sets.size());  // this node, in each
    for (size_t i = 0; i < sets.size(); ++i) {
      std::vector<uint32_t> ranks;
      bool concerns = false;
      for (const int64_t number : words.rows(1)) {
        const auto& some = replicas.at(static_cast<size_t>(number));
        ranks.insert(ranks.end(), some.begin(), some.end());
        concerns = concerns || is_near[static_cast<size_t>(number)];
      }
      if (!concerns) continue;
      sets[i].emplace(std::move(ranks), node_of);
      at_node[i] = static_cast<size_t>(std::ranges::find(sets[i]->nodes, node_of[rank_]) - sets[i]->nodes.begin());
    }
    size_t round = 0;
    for (uint64_t left = words.number(); left > 0; --left) {
      const uint64_t set = words.number_below(sets.size());
      if (const uint64_t next = words.number_below(routes_.rounds.size()); next != round) {
        finish(round);
        round = next;
      }
      take(words, sets[set], at_node[set], round);
    }
    finish(round);
    if (!words.at_end()) throw Reader::malformed();
    return true;
  }

 private:
  struct Message {
    uint64_t level;  // how many messages have to come before
    std::array<int64_t, 3> row;
  };

  void take(Reader& words, const std::optional<Members>& set, size_t node, size_t number) {
    const uint64_t root = words.number(), turn = words.number();
    const bool mirrored = words.number() != 0;
    const uint64_t bytes = words.number();
    const uint64_t pieces = words.number();
    if (set && root >= set->nodes.size()) throw Reader::malformed();
    RouteRound& round = routes_.rounds[number];
    const uint32_t holder = set ? set->holder(node, turn) : rank_;
    uint64_t offset = 0;
    if (set) {
      uint64_t& memory = memory_[holder];
      offset = align_up(memory, kPage);
      memory = offset + bytes;
    }
    if (set && holder == rank_) pass_on(*set, node, root, turn, mirrored, offset, bytes);
    bool wanted = false;
    for (uint64_t i = 0; i < pieces; ++i) {
      const uint64_t at = words.number();
      const uint64_t dims = words.number_below(uint64_t{1} << 16);
      const auto offsets = words.take(dims), sizes = words.take(dims);
      const auto rows = words.rows(2);
      Box box;
      bool is_staged = false;
      for (size_t row = 0; set && row < rows.size(); row += 2) {
        if (static_cast<uint64_t>(rows[row]) != *own_) continue;
        if (box.offset.size() != dims) box = {{offsets.begin(), offsets.end()}, {sizes.begin(), sizes.end()}};
        const Need need = need_at(static_cast<uint64_t>(rows[row + 1]), dims);
        const std::optional<Box> part = box.common(need);
        if (!part) throw Reader::malformed();
        if (holder == rank_ && node == root && !std::exchange(is_staged, true)) {
          append_staged(round.staged, need, box, offset + at);
        }
        append_place(round.places, holder == rank_ ? -1 : int64_t{holder}, offset + at, {&need, *part}, box);
        routes_.shared_bytes += part->elements() * item_bytes(need);
        wanted = true;
      }
    }
    if (!wanted) return;
    if (holder != rank_) {
      looks_at_.insert(holder);
      return;
    }
    for (const uint32_t rank : set->on_node(node)) {
      if (rank != rank_) looked_at_by_.insert(rank);
    }
  }

  Need need_at(uint64_t at, uint64_t dims) const {
    if (at >= reads_.size()) throw Reader::malformed();
    const Need need{rank_, 0, row_at(reads_, at, rank_), at};
    if (need.dims() != dims) throw Reader::malformed();
    return need;
  }

  void pass_on(const Members& set, size_t node, uint64_t root, uint64_t turn, bool mirrored, uint64_t offset,
               uint64_t bytes) {
    const RelayTree tree(mirrored, set.nodes.size());
    const uint64_t level = tree.distance(node, root);
    tree.for_each_neighbour(node, [&](uint64_t next) {
      const bool comes_from_there = tree.distance(next, root) < level;
      const std::array<int64_t, 3> row{set.holder(next, turn), static_cast<int64_t>(offset),
                                       static_cast<int64_t>(bytes)};
      if (comes_from_there) {
        receives_.push_back({level, row});
      } else {
        sends_.push_back({level + 1, row});
      }
    });
  }

  void finish(size_t number) {
    RouteRound& round = routes_.rounds[number];
    for (auto [messages, table, near] :
         {std::tuple(&sends_, &round.sends, &looked_at_by_), std::tuple(&receives_, &round.receives, &looks_at_)}) {
      std::ranges::stable_sort(*messages, {}, &Message::level);
      for (const Message& message : *messages) append(*table, message.row);
      for (const uint32_t rank : *near) append(*table, std::array<int64_t, 3>{rank, 0, 0});
      messages->clear();
      near->clear();
    }
    round.memory_bytes = memory_[rank_];
    memory_.clear();
  }

  const uint32_t rank_;
  const std::span<const int64_t> reads_;
  RankRoutes& routes_;
  std::optional<size_t> own_;              // the replicas that it is one of
  std::map<uint32_t, uint64_t> memory_;    // of each rank of the node, in the round at hand
  std::vector<Message> sends_, receives_;  // in the round at hand
  std::set<uint32_t> looks_at_, looked_at_by_;
};

}  // namespace

Pieces take_relayed(Pieces& pieces, AlikeOnNodes& alike) {
  Pieces relayed;
  std::vector<Piece> others;
  for (Piece& piece : pieces.pieces) {
    (alike.want_alike(piece.receivers, piece.box) ? relayed.pieces : others).push_back(std::move(piece));
  }
  pieces.pieces = std::move(others);
  if (!relayed.pieces.empty()) relayed.sets = pieces.sets;
  return relayed;
}

void plan_relays(Pieces pieces, const Needs& needs, std::span<const RankReads> ranks, std::span<const uint32_t> members,
                 const RouteOptions& options, std::span<uint64_t> bytes, std::vector<int64_t>& relays) {
  if (pieces.pieces.empty()) return;
  std::vector<uint32_t> node_of;
  for (const RankReads& of_rank : ranks) node_of.push_back(of_rank.node);
  std::map<uint32_t, int64_t> by_lowest;  // {lowest rank: number of its replicas}
  for (const Replicas& replicas : needs.replicas) {
    by_lowest[replicas.ranks.front()] = &replicas - needs.replicas.data();
  }
  std::vector<Words> replicas_of(pieces.sets.size());
  for (size_t set = 0; set < pieces.sets.size(); ++set) {
    std::vector<uint32_t> all;
    for (const uint32_t lowest : pieces.sets[set]) {
      replicas_of[set].push_back(by_lowest.at(lowest));
      const auto& some = needs.replicas[static_cast<size_t>(by_lowest.at(lowest))].ranks;
      all.insert(all.end(), some.begin(), some.end());
    }
    // Readers are taken in this order: from all nodes.
    std::map<uint32_t, uint32_t> before;  // ranks of a node
    std::ranges::sort(all);
    std::vector<std::tuple<uint32_t, uint32_t, uint32_t>> order;
    for (const uint32_t rank : all) order.emplace_back(before[node_of[rank]]++, node_of[rank], rank);
    std::ranges::sort(order);
    pieces.sets[set].clear();
    for (const auto& [number, node, rank] : order) pieces.sets[set].push_back(rank);
  }
  cut_large(pieces.pieces);
  choose_readers(pieces, bytes);
  std::vector<Members> sets;
  std::vector<std::vector<Bundle>> bundles;
  std::vector<size_t> number_of;  // of each of `sets`, in `pieces`
  const uint64_t limit = most_bytes_at_once(members.size(), options);
  for (size_t begin = 0, end = 0; begin < pieces.pieces.size(); begin = end) {
    const uint32_t set = pieces.pieces[begin].set;
    while (end < pieces.pieces.size() && pieces.pieces[end].set == set) ++end;
    sets.emplace_back(std::move(pieces.sets[set]), node_of);
    number_of.push_back(set);
    const auto of_set = std::span(pieces.pieces).subspan(begin, end - begin);
    bundles.push_back(bundles_of(sets.size() - 1, sets.back(), node_of, of_set, limit));
  }
  const std::vector<Bundle> scheduled = Schedule(node_of, options.budget_bytes).run(std::move(bundles), sets);

  Words words;
  append_nodes(words, node_of);
  append_number(words, needs.replicas.size());
  for (const Replicas& replicas : needs.replicas) append_ranks(words, replicas.ranks);
  append_number(words, sets.size());
  for (const size_t set : number_of) {
    append_number(words, replicas_of[set].size());
    append(words, replicas_of[set]);
  }
  append_number(words, scheduled.size());
  for (const Bundle& bundle : scheduled) {
    for (const uint64_t number : {uint64_t{bundle.set}, uint64_t{bundle.round}, uint64_t{bundle.root}, bundle.turn,
                                  uint64_t{bundle.mirrored}, bundle.bytes, uint64_t{bundle.pieces.size()}}) {
      append_number(words, number);
    }
    for (const auto& [offset, piece] : bundle.pieces) {
      append_number(words, offset);
      append_number(words, piece.box.offset.size());
      append(words, piece.box.offset);
      append(words, piece.box.size);
      append_number(words, piece.receivers.size());
      for (const Piece::Receiver& to : piece.receivers) {
        append(words,
               std::array<int64_t, 2>{to.need->replicas - needs.replicas.data(), static_cast<int64_t>(to.need->at)});
      }
    }
  }
  if (relays.empty()) relays.push_back(0);
  relays.front() = std::max(relays.front(), static_cast<int64_t>(scheduled.back().round + 1));
  append_number(relays, words.size());
  append(relays, words);
}

RankRoutes relay_routes(std::span<const int64_t> relays, uint32_t rank, std::span<const int64_t> reads) {
  RankRoutes routes;
  if (relays.empty()) return routes;
  Reader words(relays);
  routes.rounds.resize(words.number_below(uint64_t{1} << 32));
  while (!words.at_end()) {
    if (OneRank(rank, reads, routes).take(Reader(words.take(words.number())))) break;
  }
  return routes;
}

}  // namespace vescale_ckpt::share
