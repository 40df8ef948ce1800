#include "share/routes.h"

#include <algorithm>
#include <deque>
#include <map>
#include <numeric>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/fill_level.h"
#include "share/route_pieces.h"

namespace vescale_ckpt::share {

namespace {

// Upper bound of the senders to one rank in a round: the ranks of a node share the messages from other nodes.
size_t most_senders(std::span<const RankReads> ranks, std::span<const uint32_t> members) {
  std::map<uint32_t, size_t> on_node;
  for (const uint32_t rank : members) ++on_node[ranks[rank].node];
  size_t most = 0;
  for (const auto& [node, count] : on_node) most = std::max(most, (members.size() - count + count - 1) / count);
  return most;
}

constexpr uint64_t kMostParts = 4'000'000;  // of a plan; each takes some hundred bytes

using Groups = std::map<uint32_t, std::vector<uint32_t>>;  // {group: ranks}

Groups groups_of(std::span<const RankReads> ranks) {
  Groups groups;
  for (uint32_t rank = 0; rank < ranks.size(); ++rank) groups[ranks[rank].group].push_back(rank);
  return groups;
}

// Divides the ranks of a group into crews, which are planned together. Nodes with pairwise equal needs are distributed
// evenly over the fewest crews that have at most `most_nodes` of them each. Returns {needs of the ranks: crews with
// these needs}; the ranks of such crews correspond by position.
std::map<std::vector<uint32_t>, std::vector<std::vector<uint32_t>>> crews_of(std::span<const RankReads> ranks,
                                                                             std::span<const uint32_t> members,
                                                                             size_t most_nodes) {
  constexpr uint32_t kEndOfNode = UINT32_MAX;
  struct Node {
    std::vector<uint32_t> ranks, needs;  // needs: for each rank, the lowest rank with equal needs
  };
  std::map<uint32_t, Node> nodes;
  for (const Replicas& replicas : replicas_among(ranks, members)) {
    for (const uint32_t rank : replicas.ranks) {
      Node& node = nodes[ranks[rank].node];
      node.ranks.push_back(rank);
      node.needs.push_back(replicas.ranks.front());
    }
  }
  std::map<std::vector<uint32_t>, std::vector<const Node*>> alike;
  for (auto& [number, node] : nodes) {
    node.needs.push_back(kEndOfNode);
    alike[node.needs].push_back(&node);
  }
  std::vector<Node> crews;
  for (const auto& [needs, of_kind] : alike) {
    const size_t count = (of_kind.size() + most_nodes - 1) / most_nodes;
    crews.resize(std::max(crews.size(), count));
    for (size_t i = 0; i < of_kind.size(); ++i) {
      Node& crew = crews[i * count / of_kind.size()];
      crew.ranks.insert(crew.ranks.end(), of_kind[i]->ranks.begin(), of_kind[i]->ranks.end());
      crew.needs.insert(crew.needs.end(), needs.begin(), needs.end());
    }
  }
  std::map<std::vector<uint32_t>, std::vector<std::vector<uint32_t>>> result;
  for (Node& crew : crews) result[std::move(crew.needs)].push_back(std::move(crew.ranks));
  return result;
}

// Appends empty rounds, so that all ranks run equally many.
void pad_rounds(std::span<RankRoutes> routes) {
  size_t rounds = 0;
  for (const RankRoutes& of_rank : routes) rounds = std::max(rounds, of_rank.rounds.size());
  for (RankRoutes& of_rank : routes) of_rank.rounds.resize(rounds);
}

// Assigns the pieces of one set to its ranks: each takes consecutive pieces up to the fill level, give or take half of
// one.
void assign_readers(std::vector<Piece>& pieces, std::span<const size_t> group, std::span<const uint32_t> set,
                    std::span<uint64_t> bytes) {
  uint64_t total = 0;
  for (const size_t number : group) total += pieces[number].bytes;
  const uint64_t level = fill_level<uint64_t>(set, bytes, total);
  size_t current = 0;
  const auto room = [&] { return level - std::min(level, bytes[set[current]]); };
  for (const size_t number : group) {
    Piece& piece = pieces[number];
    while (current < set.size() && (room() == 0 || room() < piece.bytes / 2)) ++current;
    piece.reader = current < set.size()
                       ? set[current]
                       : *std::ranges::min_element(set, {}, [&](uint32_t rank) { return bytes[rank]; });
    bytes[piece.reader] += piece.bytes;
  }
}

// Sets the reader of each piece, so that ranks read about the same number of bytes, in long runs of a file. `bytes`:
// for each rank, the bytes that it reads in any case; adds those of its pieces. Sorts them by set and file position.
void choose_readers(Pieces& all, std::span<uint64_t> bytes) {
  std::vector<std::vector<size_t>> groups(all.sets.size());
  for (size_t i = 0; i < all.pieces.size(); ++i) groups[all.pieces[i].set].push_back(i);
  // The smallest sets first, as they leave the least choice.
  std::vector<size_t> order(all.sets.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, {}, [&](size_t set) { return all.sets[set].size(); });
  for (const size_t set : order) {
    if (!groups[set].empty()) assign_readers(all.pieces, groups[set], all.sets[set], bytes);
  }
  std::ranges::stable_sort(all.pieces, {}, &Piece::set);
}

uint64_t once_bytes(const Pieces& pieces) {
  uint64_t bytes = 0;
  for (const Piece& piece : pieces.pieces) bytes += piece.bytes;
  return bytes;
}

uint64_t alone_bytes(const Pieces& pieces, bool verify) {
  std::map<const Need*, uint64_t> shared;
  for (const Piece& piece : pieces.pieces) {
    for (const Piece::Receiver& to : piece.receivers) {
      shared[to.need] += to.box.elements() * item_bytes(*to.need) * to.need->replicas->ranks.size();
    }
  }
  double bytes = 0;
  for (const auto& [need, of_need] : shared) {
    const Box box = Box::of(*need);
    const auto wanted = static_cast<double>(box.elements() * item_bytes(*need));
    bytes += static_cast<double>(bytes_read_for(*need, box, verify)) * static_cast<double>(of_need) / wanted;
  }
  return static_cast<uint64_t>(bytes);
}

}  // namespace

std::vector<RankRoutes> plan_routes(std::span<const RankReads> ranks, const RouteOptions& options,
                                    std::span<uint64_t> bytes, std::vector<Renumbered>& renumbered) {
  std::vector<RankReads> in_messages(ranks.begin(), ranks.end());
  for (uint32_t rank = 0; rank < ranks.size() && !options.sees_neighbours; ++rank) in_messages[rank].node = rank;
  std::vector<RankRoutes> routes(ranks.size());
  uint64_t once = 0, alone = 0;
  for (const auto& [group, members] : groups_of(ranks)) {
    for (const auto& [needs_of_ranks, crews] : crews_of(ranks, members, options.most_nodes)) {
      std::vector<uint32_t> crew = crews.front();
      std::ranges::sort(crew);
      const std::vector<uint64_t> before(bytes.begin(), bytes.end());
      const Needs needs = needs_of(ranks, crew);
      const size_t senders = most_senders(in_messages, crew);
      Pieces pieces = cut_pieces(needs.rows, senders, options, routes, bytes);
      alone += alone_bytes(pieces, options.verify) * crews.size();
      const std::deque<Need> of_replicas = expand_replicas(pieces);
      split_among_nodes(pieces, ranks, options.most_nodes);
      once += once_bytes(pieces) * crews.size();
      choose_readers(pieces, bytes);
      make_rounds(pieces, in_messages, crew, senders, options, routes);
      for (const std::vector<uint32_t>& other : std::span(crews).subspan(1)) {
        for (size_t i = 0; i < other.size(); ++i) {
          const uint32_t like = crews.front()[i];
          bytes[other[i]] += bytes[like] - before[like];
        }
        renumbered.push_back({other, crews.front()});
      }
    }
  }
  for (RankRoutes& of_rank : routes) {
    of_rank.once_bytes = once;
    of_rank.alone_bytes = alone;
  }
  pad_rounds(routes);
  return routes;
}

std::vector<RankRoutes> plan_writes(std::span<const RankReads> held, const RouteOptions& options,
                                    std::span<uint64_t> bytes) {
  RouteOptions for_writes = options;
  for_writes.writes = true;
  for_writes.verify = false;
  std::vector<RankRoutes> routes(held.size());
  uint64_t parts = 0;
  for (const auto& [group, members] : groups_of(held)) {
    const Needs needs = needs_of(held, members, true);
    const size_t senders = most_senders(held, members);
    Pieces pieces = cut_pieces(needs.rows, senders, for_writes, routes, bytes);
    const std::deque<Need> of_replicas = expand_replicas(pieces);
    for (const Piece& piece : pieces.pieces) parts += piece.receivers.size();
    if (parts > kMostParts) {
      throw Error::invalid("ranks hold parts of the same rows: more than " + std::to_string(kMostParts) +
                           " parts would have to be brought to one writer");
    }
    choose_readers(pieces, bytes);
    make_rounds(pieces, held, members, senders, for_writes, routes);
  }
  for (RankRoutes& of_rank : routes) {
    for (RouteRound& round : of_rank.rounds) std::swap(round.sends, round.receives);
  }
  pad_rounds(routes);
  return routes;
}

uint64_t bytes_read_alone(const RankReads& reads, bool verify) {
  const uint32_t rank = 0;
  uint64_t bytes = 0;
  for (const Need& need : needs_of({&reads, 1}, {&rank, 1}).rows) {
    const Box box = Box::of(need);
    if (box.elements() != 0) bytes += bytes_read_for(need, box, verify);
  }
  return bytes;
}

std::vector<int64_t> pack_routes(const RankRoutes& routes) {
  std::vector<int64_t> words;
  for (const uint64_t number :
       {routes.rounds.size(), routes.shared_bytes, routes.once_bytes, routes.alone_bytes, routes.own.size()}) {
    words.push_back(static_cast<int64_t>(number));
  }
  words.insert(words.end(), routes.own.begin(), routes.own.end());
  for (const RouteRound& round : routes.rounds) {
    const auto tables = {&round.staged, &round.packs, &round.sends, &round.receives, &round.places};
    words.push_back(static_cast<int64_t>(round.memory_bytes));
    for (const auto* table : tables) words.push_back(static_cast<int64_t>(table->size()));
    for (const auto* table : tables) words.insert(words.end(), table->begin(), table->end());
  }
  return words;
}

}  // namespace vescale_ckpt::share
