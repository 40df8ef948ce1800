#include "share/route_pieces.h"

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "base/memory.h"
#include "state/tables.h"

namespace vescale_ckpt::share {
namespace {

using state::append;

constexpr uint64_t kAlignment = 64;
constexpr int64_t kOwnMemory = -1;

uint64_t parcel_bytes(const Box& box, const Piece& piece) {
  return box.elements() * item_bytes(*piece.like);
}

// The pieces that a rank reads in one round.
struct Bucket {
  struct Entry {
    const Piece* piece;
    std::map<uint32_t, Parcels> by_node;
    uint64_t offset = 0;  // in staging memory
  };
  std::vector<Entry> entries;
  uint64_t staging_bytes = 0;
  uint64_t packed_bytes = 0;  // of all distinct messages, if all have to be packed
  bool uniform = true;        // each receiving node gets all of it
};

class Rounds {
 public:
  Rounds(const Pieces& pieces, std::span<const RankReads> ranks, std::span<const uint32_t> members, size_t senders,
         const RouteOptions& options, std::span<RankRoutes> routes)
      : ranks_(ranks),
        members_(members),
        options_(options),
        routes_(routes),
        buckets_(routes.size()),
        received_bytes_(routes.size()) {
    const uint64_t most = max_piece_bytes(senders, options);
    for (const Piece& piece : pieces.pieces) fill(piece, most);
  }

  // Readers take turns if the messages of all of them would exceed a rank's memory.
  void run() {
    std::vector<size_t> done(routes_.size());
    std::vector<Messages> next(routes_.size());  // of the next bucket of each reader, which may wait for many rounds
    size_t left = 0, turn = 0;
    for (const uint32_t rank : members_) {
      left += buckets_[rank].size();
      if (!buckets_[rank].empty()) next[rank] = messages_of(buckets_[rank].front(), rank);
    }
    for (size_t round = 0; left > 0; ++round) {
      for (const uint32_t rank : members_) routes_[rank].rounds.resize(round + 1);
      announced_.clear();
      bool any = false;
      size_t next_turn = turn;
      for (size_t step = 0; step < members_.size(); ++step) {
        const size_t member = (turn + step) % members_.size();
        const uint32_t reader = members_[member];
        if (done[reader] == buckets_[reader].size()) continue;
        Bucket& bucket = buckets_[reader][done[reader]];
        if (any && !has_room(bucket, next[reader], reader, round)) {
          if (next_turn == turn) next_turn = member;  // the first that was skipped begins the next round
          continue;
        }
        any = true;
        deliver(bucket, next[reader], reader, round);
        next[reader].clear();
        bucket = {};
        --left;
        if (++done[reader] < buckets_[reader].size()) {
          next[reader] = messages_of(buckets_[reader][done[reader]], reader);
        }
      }
      turn = next_turn;
    }
  }

 private:
  // The message of a reader to a node. One rank there receives it, and the others read it in that rank's buffer.
  struct Message {
    struct Part {
      const Bucket::Entry* entry;
      const Parcel* parcel;
    };
    std::vector<Part> parts;
    std::vector<uint32_t> ranks;      // its receivers on the node, ascending
    bool packed = false;              // else the staging memory is sent as it is
    std::optional<uint32_t> same_as;  // an earlier node, whose packed message is the same
    uint64_t bytes = 0;

    bool takes_memory() const { return packed && !same_as; }  // besides the staging memory
  };
  using Messages = std::map<uint32_t, Message>;  // {node: message}

  uint32_t node(uint32_t rank) const { return ranks_[rank].node; }

  std::map<uint32_t, Parcels> parcels_of(const Piece& piece) const {
    std::map<uint32_t, Parcels> by_node;
    for (const Piece::Receiver& to : piece.receivers) {
      Parcels& parcels = by_node[node(to.need->rank)];
      if (node(to.need->rank) == node(piece.reader)) {  // they read the piece in place
        if (parcels.empty()) parcels.push_back({piece.box, {}});
        parcels.front().receivers.push_back(&to);
      } else {
        join(parcels, {to.box, {&to}});
      }
    }
    return by_node;
  }

  static bool is_whole(const Piece& piece, const Parcels& parcels) {
    return parcels.size() == 1 && parcels.front().box == piece.box;
  }

  // Returns the bytes that a piece takes in packed messages to other nodes. A box that goes to several is packed once.
  static uint64_t bytes_to_pack(const Piece& piece, const std::map<uint32_t, Parcels>& by_node, uint32_t own_node) {
    const auto less = [](const Box* left, const Box* right) {
      return std::tie(left->offset, left->size) < std::tie(right->offset, right->size);
    };
    std::set<const Box*, decltype(less)> boxes(less);
    uint64_t bytes = 0;
    for (const auto& [to_node, parcels] : by_node) {
      for (const Parcel& parcel : parcels) {
        if (to_node == own_node || !boxes.insert(&parcel.box).second) continue;
        bytes += align_up(parcel_bytes(parcel.box, piece), kAlignment);
      }
    }
    return bytes;
  }

  void fill(const Piece& piece, uint64_t most) {
    std::vector<Bucket>& of_reader = buckets_[piece.reader];
    Bucket::Entry entry{&piece, parcels_of(piece)};
    const uint64_t packed = bytes_to_pack(piece, entry.by_node, node(piece.reader));
    const bool whole =
        std::ranges::all_of(entry.by_node, [&](const auto& of_node) { return is_whole(piece, of_node.second); });
    if (!of_reader.empty()) {
      Bucket& last = of_reader.back();
      entry.offset = staging_offset(*piece.like, piece.box, options_.writes, last.staging_bytes);
      const bool uniform = last.uniform && whole && piece.set == last.entries.front().piece->set;
      const uint64_t memory = entry.offset + piece.bytes + (uniform ? 0 : last.packed_bytes + packed);
      if (entry.offset + piece.bytes <= most && memory <= options_.budget_bytes) {
        last.uniform = uniform;
        return add(last, std::move(entry), packed);
      }
    }
    Bucket& bucket = of_reader.emplace_back();
    bucket.uniform = whole;
    entry.offset = staging_offset(*piece.like, piece.box, options_.writes, 0);
    add(bucket, std::move(entry), packed);
  }

  static void add(Bucket& bucket, Bucket::Entry entry, uint64_t packed_bytes) {
    bucket.staging_bytes = entry.offset + entry.piece->bytes;
    bucket.packed_bytes += packed_bytes;
    bucket.entries.push_back(std::move(entry));
  }

  // The messages point into the bucket.
  Messages messages_of(const Bucket& bucket, uint32_t reader) const {
    Messages messages;
    std::map<std::vector<int64_t>, uint32_t> packed_for;  // {contents of a message: the node that it is packed for}
    for (const Bucket::Entry& entry : bucket.entries) {
      for (const auto& [to_node, parcels] : entry.by_node) {
        Message& message = messages[to_node];
        for (const Parcel& parcel : parcels) {
          message.parts.push_back({&entry, &parcel});
          for (const Piece::Receiver* to : parcel.receivers) message.ranks.push_back(to->need->rank);
        }
      }
    }
    for (auto& [to_node, message] : messages) {
      std::ranges::sort(message.ranks);
      message.ranks.erase(std::ranges::unique(message.ranks).begin(), message.ranks.end());
      if (to_node == node(reader)) continue;
      message.packed = message.parts.size() != bucket.entries.size();
      for (const auto& [entry, parcel] : message.parts) {
        message.packed = message.packed || parcel->box != entry->piece->box;
        message.bytes = align_up(message.bytes, kAlignment) + parcel_bytes(parcel->box, *entry->piece);
      }
      if (!message.packed) {
        message.bytes = bucket.staging_bytes;
      } else if (const auto [first, is_new] = packed_for.emplace(contents(message), to_node); !is_new) {
        message.same_as = first->second;
      }
    }
    return messages;
  }

  static std::vector<int64_t> contents(const Message& message) {
    std::vector<int64_t> words;
    for (const auto& [entry, parcel] : message.parts) {
      words.push_back(static_cast<int64_t>(entry->offset));
      append(words, parcel->box.offset);
      append(words, parcel->box.size);
    }
    return words;
  }

  // The receiving rank of a message: the one with the smallest buffer in the round, then the fewest bytes received.
  uint32_t receiver_of(const Message& message, size_t round) const {
    return *std::ranges::min_element(message.ranks, {}, [&](uint32_t rank) {
      return std::pair(routes_[rank].rounds[round].memory_bytes, received_bytes_[rank]);
    });
  }

  bool has_room(const Bucket& bucket, const Messages& messages, uint32_t reader, size_t round) const {
    const auto after = [&](uint32_t rank, uint64_t more, uint64_t alignment) {
      return align_up(routes_[rank].rounds[round].memory_bytes, alignment) + more;
    };
    uint64_t mine = bucket.staging_bytes;
    for (const auto& [to_node, message] : messages) {
      if (to_node == node(reader)) continue;
      if (after(receiver_of(message, round), message.bytes, kAlignment) > options_.budget_bytes) return false;
      if (message.takes_memory()) mine = align_up(mine, kAlignment) + message.bytes;
    }
    return after(reader, mine, kBlock) <= options_.budget_bytes;
  }

  static uint64_t take_memory(RouteRound& round, uint64_t bytes, uint64_t alignment) {
    const uint64_t offset = align_up(round.memory_bytes, alignment);
    round.memory_bytes = offset + bytes;
    return offset;
  }

  // Lets `rank` read the buffer of `holder`, on the same node, in this round. Returns the peer for its places.
  int64_t read_memory(uint32_t rank, uint32_t holder, size_t round) {
    if (rank == holder) return kOwnMemory;
    if (announced_.emplace(holder, rank).second) {
      append(routes_[holder].rounds[round].sends, std::array{int64_t{rank}, int64_t{0}, int64_t{0}});
      append(routes_[rank].rounds[round].receives, std::array{int64_t{holder}, int64_t{0}, int64_t{0}});
    }
    return int64_t{holder};
  }

  void deliver(const Bucket& bucket, const Messages& messages, uint32_t reader, size_t round) {
    RouteRound& mine = routes_[reader].rounds[round];
    const uint64_t staging = take_memory(mine, bucket.staging_bytes, kBlock);
    for (const Bucket::Entry& entry : bucket.entries) {
      stage(mine, *entry.piece, reader, staging + entry.offset);
      for (const Piece::Receiver& to : entry.piece->receivers) {
        routes_[to.need->rank].shared_bytes += to.box.elements() * item_bytes(*to.need);
      }
    }
    std::map<uint32_t, uint64_t> packed_at;  // {node: offset}
    for (const auto& [to_node, message] : messages) {
      if (to_node == node(reader)) {
        for (const auto& [entry, parcel] : message.parts) {
          place_all(*parcel, reader, staging + entry->offset, round);
        }
        continue;
      }
      const auto bytes = static_cast<int64_t>(message.bytes);
      uint64_t from = staging;
      if (message.packed) {
        from = message.same_as ? packed_at.at(*message.same_as) : take_memory(mine, message.bytes, kAlignment);
        packed_at[to_node] = from;
      }
      const uint32_t receiver = receiver_of(message, round);
      RouteRound& theirs = routes_[receiver].rounds[round];
      const uint64_t to = take_memory(theirs, message.bytes, kAlignment);
      received_bytes_[receiver] += message.bytes;
      append(mine.sends, std::array{int64_t{receiver}, static_cast<int64_t>(from), bytes});
      append(theirs.receives, std::array{int64_t{reader}, static_cast<int64_t>(to), bytes});
      uint64_t at = 0;  // in the message
      for (const auto& [entry, parcel] : message.parts) {
        const Piece& piece = *entry->piece;
        at = message.packed ? align_up(at, kAlignment) : entry->offset;
        if (message.takes_memory()) pack(mine, staging + entry->offset, from + at, piece, parcel->box);
        place_all(*parcel, receiver, to + at, round);
        at += parcel_bytes(parcel->box, piece);
      }
    }
  }

  // Adds the copies of a parcel's receivers from an offset in the buffer of `holder`, a rank of their node.
  void place_all(const Parcel& parcel, uint32_t holder, uint64_t offset, size_t round) {
    for (const Piece::Receiver* to : parcel.receivers) {
      const uint32_t rank = to->need->rank;
      const int64_t peer = read_memory(rank, holder, round);
      append_place(routes_[rank].rounds[round].places, peer, offset, *to, parcel.box);
    }
  }

  // Adds a read of a piece.
  static void stage(RouteRound& round, const Piece& piece, uint32_t reader, uint64_t offset) {
    // The file numbers are those of the reader, which is a receiver.
    const auto own =
        std::ranges::find(piece.receivers, reader, [](const Piece::Receiver& to) { return to.need->rank; });
    append_staged(round.staged, *own->need, piece.box, offset);
  }

  static void pack(RouteRound& round, uint64_t from, uint64_t to, const Piece& piece, const Box& box) {
    append(round.packs, std::array{static_cast<int64_t>(from), static_cast<int64_t>(to), piece.like->dtype(),
                                   static_cast<int64_t>(box.size.size())});
    append(round.packs, piece.box.size);
    for (size_t dim = 0; dim < box.offset.size(); ++dim) {
      round.packs.push_back(box.offset[dim] - piece.box.offset[dim]);
    }
    append(round.packs, box.size);
  }

  const std::span<const RankReads> ranks_;
  const std::span<const uint32_t> members_;
  const RouteOptions options_;
  const std::span<RankRoutes> routes_;
  std::vector<std::vector<Bucket>> buckets_;           // one for each reader
  std::vector<uint64_t> received_bytes_;               // for each rank, from other nodes
  std::set<std::pair<uint32_t, uint32_t>> announced_;  // (holder, reader) pairs of this round that are signalled
};

}  // namespace

void make_rounds(const Pieces& pieces, std::span<const RankReads> ranks, std::span<const uint32_t> members,
                 size_t senders, const RouteOptions& options, std::span<RankRoutes> routes) {
  Rounds(pieces, ranks, members, senders, options, routes).run();
}

}  // namespace vescale_ckpt::share
