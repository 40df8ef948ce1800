#include "share/route_rounds.h"

#include <array>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "share/words.h"

namespace vescale_ckpt::share {
namespace {

constexpr uint64_t kPage = 4096, kAlignment = 64;
constexpr uint64_t kLargeBytes = 64 << 10;  // worth a place in memory from which it can be read directly
constexpr int64_t kOwnMemory = -1;
constexpr uint64_t kBodyInPage = 64;  // where in a page of its file a large tensor's data starts

uint64_t align_up(uint64_t value, uint64_t to) {
  return (value + to - 1) / to * to;
}

// What a rank reads in one round.
struct Bucket {
  std::vector<const Piece*> pieces;
  std::vector<uint64_t> offsets;  // of each, in staging memory
  uint64_t staging_bytes = 0;
  uint64_t packed_bytes = 0;  // of all messages that differ, if all have to be packed
  bool uniform = true;        // all ranks that get anything get all of it
};

// Bytes at the same place within a page as in the file go there without a copy.
uint64_t staging_offset(const Piece& piece, uint64_t cursor) {
  if (piece.bytes < kLargeBytes) return align_up(cursor, kAlignment);
  uint64_t element = 0;  // of the chunk: the first that is read
  for (size_t dim = 0; dim < piece.box.offset.size(); ++dim) {
    element = element * static_cast<uint64_t>(piece.like->chunk()[dim]) + static_cast<uint64_t>(piece.box.offset[dim]);
  }
  const uint64_t within = (element * item_bytes(*piece.like) + kBodyInPage) % kPage;
  const uint64_t page = cursor / kPage * kPage;
  return page + within >= cursor ? page + within : page + kPage + within;
}

void append_difference(std::vector<int64_t>& to, std::span<const int64_t> at, std::span<const int64_t> origin) {
  for (size_t dim = 0; dim < at.size(); ++dim) to.push_back(at[dim] - origin[dim]);
}

class Rounds {
 public:
  Rounds(const Pieces& pieces, std::span<const RankReads> ranks, std::span<const uint32_t> members, size_t senders,
         const RouteOptions& options, std::span<RankRoutes> routes)
      : ranks_(ranks), members_(members), options_(options), routes_(routes), buckets_(routes.size()) {
    const uint64_t most = most_bytes_at_once(senders, options);
    for (const Piece& piece : pieces.pieces) fill(piece, most);
  }

  // Readers take turns where messages of all at once would be more than somebody has memory for.
  void run() {
    std::vector<size_t> done(routes_.size());
    std::vector<std::map<uint32_t, Message>> next(routes_.size());  // what each would send: asked for in many rounds
    size_t left = 0, turn = 0;
    for (const uint32_t rank : members_) {
      left += buckets_[rank].size();
      if (!buckets_[rank].empty()) next[rank] = messages_of(buckets_[rank].front(), rank);
    }
    for (size_t round = 0; left > 0; ++round) {
      for (const uint32_t rank : members_) routes_[rank].rounds.resize(round + 1);
      bool any = false;
      size_t next_turn = turn;
      for (size_t step = 0; step < members_.size(); ++step) {
        const size_t member = (turn + step) % members_.size();
        const uint32_t reader = members_[member];
        if (done[reader] == buckets_[reader].size()) continue;
        const Bucket& bucket = buckets_[reader][done[reader]];
        if (any && !has_room(bucket, next[reader], reader, round)) {
          if (next_turn == turn) next_turn = member;  // who was left out first begins the next round
          continue;
        }
        any = true;
        deliver(bucket, next[reader], reader, round);
        --left;
        if (++done[reader] < buckets_[reader].size()) {
          next[reader] = messages_of(buckets_[reader][done[reader]], reader);
        }
      }
      turn = next_turn;
    }
  }

 private:
  struct Message {
    struct Part {
      size_t piece;  // in the bucket
      const Piece::Receiver* to;
    };
    std::vector<Part> parts;
    bool near = false;                // the peer sees the staging memory
    bool packed = false;              // else it is the staging memory itself
    std::optional<uint32_t> same_as;  // an earlier peer, for whom the very same is packed
    uint64_t bytes = 0;

    bool takes_memory() const { return packed && !same_as; }  // of the reader, beside the staging memory
  };

  bool near(uint32_t left, uint32_t right) const { return ranks_[left].node == ranks_[right].node; }

  // What ranks of several replicas want alike is packed once.
  uint64_t bytes_to_pack(const Piece& piece) const {
    const auto less = [](const Box* left, const Box* right) {
      return std::tie(left->offset, left->size) < std::tie(right->offset, right->size);
    };
    std::set<const Box*, decltype(less)> boxes(less);
    uint64_t bytes = 0;
    for (const Piece::Receiver& to : piece.receivers) {
      if (near(to.need->rank, piece.reader) || !boxes.insert(&to.box).second) continue;
      bytes += align_up(to.box.elements() * item_bytes(*piece.like), kAlignment);
    }
    return bytes;
  }

  void fill(const Piece& piece, uint64_t most) {
    std::vector<Bucket>& of_reader = buckets_[piece.reader];
    const uint64_t packed = bytes_to_pack(piece);
    if (!of_reader.empty()) {
      Bucket& last = of_reader.back();
      const uint64_t offset = staging_offset(piece, last.staging_bytes);
      const bool uniform = last.uniform && piece.wanted_whole && piece.set == last.pieces.front()->set;
      const uint64_t memory = offset + piece.bytes + (uniform ? 0 : last.packed_bytes + packed);
      if (offset + piece.bytes <= most && memory <= options_.budget_bytes) {
        last.uniform = uniform;
        return add(last, piece, offset, packed);
      }
    }
    Bucket& bucket = of_reader.emplace_back();
    bucket.uniform = piece.wanted_whole;
    add(bucket, piece, staging_offset(piece, 0), packed);
  }

  static void add(Bucket& bucket, const Piece& piece, uint64_t offset, uint64_t packed_bytes) {
    bucket.pieces.push_back(&piece);
    bucket.offsets.push_back(offset);
    bucket.staging_bytes = offset + piece.bytes;
    bucket.packed_bytes += packed_bytes;
  }

  std::map<uint32_t, Message> messages_of(const Bucket& bucket, uint32_t reader) const {
    std::map<uint32_t, Message> messages;
    std::map<std::vector<int64_t>, uint32_t> packed_for;  // by what is in it
    for (size_t i = 0; i < bucket.pieces.size(); ++i) {
      for (const Piece::Receiver& to : bucket.pieces[i]->receivers) {
        if (to.need->rank != reader) messages[to.need->rank].parts.push_back({i, &to});
      }
    }
    for (auto& [peer, message] : messages) {
      message.near = near(peer, reader);
      if (message.near) continue;
      message.packed = message.parts.size() != bucket.pieces.size();  // a second box of a piece is a part of its own
      for (const Message::Part& part : message.parts) {
        const Piece& piece = *bucket.pieces[part.piece];
        message.packed = message.packed || part.to->box != piece.box;
        message.bytes = align_up(message.bytes, kAlignment) + part.to->box.elements() * item_bytes(*piece.like);
      }
      if (!message.packed) {
        message.bytes = bucket.staging_bytes;
      } else if (const auto [first, is_new] = packed_for.emplace(contents(message), peer); !is_new) {
        message.same_as = first->second;
      }
    }
    return messages;
  }

  static std::vector<int64_t> contents(const Message& message) {
    std::vector<int64_t> words;
    for (const auto& [piece, to] : message.parts) {
      words.push_back(static_cast<int64_t>(piece));
      append(words, to->box.offset);
      append(words, to->box.size);
    }
    return words;
  }

  bool has_room(const Bucket& bucket, const std::map<uint32_t, Message>& messages, uint32_t reader,
                size_t round) const {
    const auto after = [&](uint32_t rank, uint64_t more, uint64_t alignment) {
      return align_up(routes_[rank].rounds[round].memory_bytes, alignment) + more;
    };
    uint64_t mine = bucket.staging_bytes;
    for (const auto& [peer, message] : messages) {
      if (message.near) continue;
      if (after(peer, message.bytes, kAlignment) > options_.budget_bytes) return false;
      if (message.takes_memory()) mine = align_up(mine, kAlignment) + message.bytes;
    }
    return after(reader, mine, kPage) <= options_.budget_bytes;
  }

  static uint64_t take_memory(RouteRound& round, uint64_t bytes, uint64_t alignment) {
    const uint64_t offset = align_up(round.memory_bytes, alignment);
    round.memory_bytes = offset + bytes;
    return offset;
  }

  void deliver(const Bucket& bucket, const std::map<uint32_t, Message>& messages, uint32_t reader, size_t round) {
    RouteRound& mine = routes_[reader].rounds[round];
    const uint64_t staging = take_memory(mine, bucket.staging_bytes, kPage);
    for (size_t i = 0; i < bucket.pieces.size(); ++i) {
      const Piece& piece = *bucket.pieces[i];
      stage(mine, piece, reader, staging + bucket.offsets[i]);
      for (const Piece::Receiver& to : piece.receivers) {
        RankRoutes& receiver = routes_[to.need->rank];
        receiver.shared_bytes += to.box.elements() * item_bytes(*to.need);
      }
    }
    std::map<uint32_t, uint64_t> packed_at;  // by peer
    for (const auto& [peer, message] : messages) {
      RouteRound& theirs = routes_[peer].rounds[round];
      if (message.near) {
        append(mine.sends, std::array{int64_t{peer}, int64_t{0}, int64_t{0}});
        append(theirs.receives, std::array{int64_t{reader}, int64_t{0}, int64_t{0}});
        for (const auto& [number, receiver] : message.parts) {
          place(theirs, reader, staging + bucket.offsets[number], *receiver, bucket.pieces[number]->box);
        }
        continue;
      }
      const auto bytes = static_cast<int64_t>(message.bytes);
      uint64_t from = staging;
      if (message.packed) {
        from = message.same_as ? packed_at.at(*message.same_as) : take_memory(mine, message.bytes, kAlignment);
        packed_at[peer] = from;
      }
      const uint64_t to = take_memory(theirs, message.bytes, kAlignment);
      append(mine.sends, std::array{int64_t{peer}, static_cast<int64_t>(from), bytes});
      append(theirs.receives, std::array{int64_t{reader}, static_cast<int64_t>(to), bytes});
      uint64_t at = 0;  // in the message
      for (const auto& [number, receiver] : message.parts) {
        const Piece& piece = *bucket.pieces[number];
        if (!message.packed) {
          place(theirs, kOwnMemory, to + bucket.offsets[number], *receiver, piece.box);
          continue;
        }
        at = align_up(at, kAlignment);
        if (!message.same_as) pack(mine, staging + bucket.offsets[number], from + at, piece, receiver->box);
        place(theirs, kOwnMemory, to + at, *receiver, receiver->box);
        at += receiver->box.elements() * item_bytes(*piece.like);
      }
    }
  }

  // A piece that is read, and what the reader itself wants of it.
  static void stage(RouteRound& round, const Piece& piece, uint32_t reader, uint64_t offset) {
    const Need* own = nullptr;  // which numbers files as the reader does
    for (const Piece::Receiver& to : piece.receivers) {
      if (to.need->rank != reader) continue;
      own = to.need;
      place(round, kOwnMemory, offset, to, piece.box);
    }
    round.staged.push_back(static_cast<int64_t>(offset));
    append(round.staged, own->row.first(Need::kHead));
    append(round.staged, own->chunk());
    append(round.staged, piece.box.offset);
    append(round.staged, piece.box.size);
  }

  static void pack(RouteRound& round, uint64_t from, uint64_t to, const Piece& piece, const Box& box) {
    append(round.packs, std::array{static_cast<int64_t>(from), static_cast<int64_t>(to), piece.like->dtype(),
                                   static_cast<int64_t>(box.size.size())});
    append(round.packs, piece.box.size);
    append_difference(round.packs, box.offset, piece.box.offset);
    append(round.packs, box.size);
  }

  // `lies`: the box that lies contiguously at the offset.
  static void place(RouteRound& round, int64_t peer, uint64_t from, const Piece::Receiver& to, const Box& lies) {
    const Need& need = *to.need;
    append(round.places, std::array{peer, static_cast<int64_t>(from), need.item(), need.dtype(),
                                    static_cast<int64_t>(to.box.size.size())});
    append(round.places, lies.size);
    append_difference(round.places, to.box.offset, lies.offset);
    append(round.places, to.box.size);
    for (size_t dim = 0; dim < need.dims(); ++dim) {
      round.places.push_back(need.target()[dim] + to.box.offset[dim] - need.box_offset()[dim]);
    }
  }

  const std::span<const RankReads> ranks_;
  const std::span<const uint32_t> members_;
  const RouteOptions options_;
  const std::span<RankRoutes> routes_;
  std::vector<std::vector<Bucket>> buckets_;  // by reader
};

}  // namespace

void make_rounds(const Pieces& pieces, std::span<const RankReads> ranks, std::span<const uint32_t> members,
                 size_t senders, const RouteOptions& options, std::span<RankRoutes> routes) {
  Rounds(pieces, ranks, members, senders, options, routes).run();
}

}  // namespace vescale_ckpt::share
