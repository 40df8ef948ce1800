#include "share/route_pieces.h"

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "base/memory.h"
#include "base/overlap.h"
#include "format/checksum_table.h"
#include "format/torch_record.h"
#include "io/transfer.h"
#include "state/tables.h"

namespace vescale_ckpt::share {
namespace {

using state::append;

constexpr int64_t kUnknownCrc = -1;

bool same_record(const Need& left, const Need& right) {
  return left.file == right.file && left.record_offset() == right.record_offset();
}

class Cutter {
 public:
  Cutter(size_t senders, const RouteOptions& options, std::span<RankRoutes> routes, std::span<uint64_t> own_bytes)
      : limit_(max_piece_bytes(senders, options)), options_(options), routes_(routes), own_bytes_(own_bytes) {}

  // `needs` are all of one record.
  void cut(std::span<const Need> needs) {
    std::optional<Box> needed;
    const Need& first = needs.front();
    for (const Need& need : needs) {
      const bool equal = need.record_length() == first.record_length() && need.crc() == first.crc() &&
                         need.dtype() == first.dtype() && std::ranges::equal(need.chunk(), first.chunk());
      if (!equal) throw Error::invalid("ranks disagree about what is stored in one place", need.rank);
      Box box = Box::of(need);
      if (box.elements() == 0) continue;
      if (needed) {
        needed->cover(box);
      } else {
        needed = std::move(box);
      }
    }
    if (!needed) return;
    own_.assign(needs.size(), {});
    const bool alone =
        is_one_rank(first) && std::ranges::all_of(needs, [&](const Need& need) { return need.rank == first.rank; });
    const bool only_whole = options_.verify && first.crc() == kUnknownCrc;
    if (alone || (only_whole && needed->elements() * item_bytes(first) > options_.whole_bytes)) {
      for (size_t i = 0; i < needs.size(); ++i) own_[i] = {Box::of(needs[i])};
    } else if (only_whole) {
      add(needs, *needed);
    } else {
      cut_slabs(needs, *needed);
    }
    for (size_t i = 0; i < needs.size(); ++i) add_own(needs[i], own_[i]);
  }

  Pieces take() {
    Pieces result{std::move(pieces_), std::vector<std::vector<uint32_t>>(sets_.size())};
    for (const auto& [ranks, number] : sets_) result.sets[number] = ranks;
    return result;
  }

 private:
  static bool is_one_rank(const Need& need) { return need.replicas->ranks.size() == 1; }

  // Cuts along the first dimension whose slices fit in a piece, at each index of the dimensions before it.
  void cut_slabs(std::span<const Need> needs, const Box& needed) {
    size_t cut_dim = 0;
    uint64_t slice = needed.elements() * item_bytes(needs.front());
    if (slice <= limit_) return add(needs, needed);
    for (; cut_dim < needed.size.size(); ++cut_dim) {
      slice /= static_cast<uint64_t>(needed.size[cut_dim]);
      if (slice <= limit_) break;
    }
    const auto most = static_cast<int64_t>(limit_ / slice);
    const int64_t length = needed.size[cut_dim], count = (length + most - 1) / most;  // evenly long slabs
    Box box = needed;
    for (size_t dim = 0; dim < cut_dim; ++dim) box.size[dim] = 1;
    do {
      for (int64_t slab = 0; slab < count; ++slab) {
        const int64_t begin = length * slab / count, end = length * (slab + 1) / count;
        box.offset[cut_dim] = needed.offset[cut_dim] + begin;
        box.size[cut_dim] = end - begin;
        add(needs, box);
      }
    } while (next_index(box, needed, cut_dim));
  }

  // Advances the index of the dimensions before `dims`; false after the last.
  static bool next_index(Box& box, const Box& of, size_t dims) {
    for (size_t dim = dims; dim-- > 0;) {
      if (++box.offset[dim] < of.offset[dim] + of.size[dim]) return true;
      box.offset[dim] = of.offset[dim];
    }
    return false;
  }

  void add(std::span<const Need> needs, const Box& box) {
    std::vector<Piece::Receiver> receivers;
    for (const Need& need : needs) {
      if (std::optional<Box> part = box.common(need)) receivers.push_back({&need, std::move(*part)});
    }
    if (!receivers.empty()) add(needs.data(), std::move(receivers));
  }

  // `needs`: the first of the record.
  void add(const Need* needs, std::vector<Piece::Receiver> receivers) {
    std::vector<uint32_t> ranks;
    for (const Piece::Receiver& receiver : receivers) {
      if (ranks.empty() || ranks.back() != receiver.need->rank) ranks.push_back(receiver.need->rank);
    }
    Piece piece{};
    piece.receive(std::move(receivers));
    if (ranks.size() == 1 && is_one_rank(*piece.like)) {
      for (Piece::Receiver& receiver : piece.receivers) {
        std::vector<Box>& own = own_[static_cast<size_t>(receiver.need - needs)];
        own.push_back(std::move(receiver.box));
        join_last(own);
      }
      return;
    }
    piece.set = sets_.emplace(std::move(ranks), static_cast<uint32_t>(sets_.size())).first->second;
    pieces_.push_back(std::move(piece));
  }

  // Merges the slabs, which come in ascending order, into the box that they were cut from.
  static void join_last(std::vector<Box>& boxes) {
    while (boxes.size() > 1 && boxes[boxes.size() - 2].join(boxes.back())) boxes.pop_back();
  }

  void add_own(const Need& need, const std::vector<Box>& boxes) {
    for (const Box& box : boxes) {
      if (box.elements() == 0) continue;
      for (const uint32_t rank : need.replicas->ranks) {
        append_read(routes_[rank].own, need, box);
        own_bytes_[rank] += box.elements() * item_bytes(need);
      }
    }
  }

  const uint64_t limit_;
  const RouteOptions options_;
  const std::span<RankRoutes> routes_;
  const std::span<uint64_t> own_bytes_;
  std::vector<Piece> pieces_;
  std::map<std::vector<uint32_t>, uint32_t> sets_;
  std::vector<std::vector<Box>> own_;  // for each need of the current record, the boxes that only its rank needs
};

}  // namespace

void append_read(std::vector<int64_t>& reads, const Need& need, const Box& box) {
  append(reads, need.row.first(Need::kHead));
  append(reads, need.chunk());
  append(reads, box.offset);
  append(reads, box.size);
  for (size_t dim = 0; dim < need.dims(); ++dim) {
    reads.push_back(need.target()[dim] + box.offset[dim] - need.box_offset()[dim]);
  }
}

Box Box::of(const Need& need) {
  return {{need.box_offset().begin(), need.box_offset().end()}, {need.box_size().begin(), need.box_size().end()}};
}

std::optional<Box> Box::common(const Need& need) const {
  const auto shared = [&](size_t dim) {
    return overlap(offset[dim], size[dim], need.box_offset()[dim], need.box_size()[dim]);
  };
  for (size_t dim = 0; dim < offset.size(); ++dim) {
    if (shared(dim).empty()) return std::nullopt;
  }
  Box result = *this;
  for (size_t dim = 0; dim < offset.size(); ++dim) {
    result.offset[dim] = shared(dim).begin;
    result.size[dim] = shared(dim).size();
  }
  return result;
}

void Box::cover(const Box& other) {
  for (size_t dim = 0; dim < offset.size(); ++dim) {
    const int64_t end = std::max(offset[dim] + size[dim], other.offset[dim] + other.size[dim]);
    offset[dim] = std::min(offset[dim], other.offset[dim]);
    size[dim] = end - offset[dim];
  }
}

bool Box::join(const Box& next) {
  std::optional<size_t> differs;
  for (size_t dim = 0; dim < offset.size(); ++dim) {
    if (offset[dim] == next.offset[dim] && size[dim] == next.size[dim]) continue;
    if (differs || offset[dim] + size[dim] != next.offset[dim]) return false;
    differs = dim;
  }
  if (!differs) return false;
  size[*differs] += next.size[*differs];
  return true;
}

uint64_t Box::elements() const {
  return std::accumulate(size.begin(), size.end(), uint64_t{1},
                         [](uint64_t product, int64_t length) { return product * static_cast<uint64_t>(length); });
}

void Piece::receive(std::vector<Receiver> by_rank) {
  like = by_rank.front().need;
  box = by_rank.front().box;
  for (const Receiver& to : by_rank) box.cover(to.box);
  bytes = box.elements() * item_bytes(*like);
  receivers = std::move(by_rank);
}

void join(Parcels& parcels, Parcel next) {
  for (size_t i = 0; i < parcels.size(); ++i) {
    Box both = parcels[i].box;
    both.cover(next.box);
    if (both.elements() > parcels[i].box.elements() + next.box.elements()) continue;
    next.box = std::move(both);
    next.receivers.insert(next.receivers.end(), parcels[i].receivers.begin(), parcels[i].receivers.end());
    parcels.erase(parcels.begin() + static_cast<ptrdiff_t>(i));
    return join(parcels, std::move(next));
  }
  parcels.push_back(std::move(next));
}

uint64_t staging_offset(const Need& need, const Box& box, bool in_file, uint64_t cursor) {
  constexpr uint64_t kAlignment = 64;
  constexpr uint64_t kLargeBytes = 64 << 10;  // worth an offset that direct reads can use
  constexpr uint64_t kBodyInPage = 64;        // page offset of a large tensor's data in its file
  if (!in_file && box.elements() * item_bytes(need) < kLargeBytes) return align_up(cursor, kAlignment);
  uint64_t element = 0;  // index in the chunk of the box's first element
  for (size_t dim = 0; dim < box.offset.size(); ++dim) {
    element = element * static_cast<uint64_t>(need.chunk()[dim]) + static_cast<uint64_t>(box.offset[dim]);
  }
  const uint64_t body = in_file ? static_cast<uint64_t>(need.record_offset()) : kBodyInPage;
  return next_congruent(cursor, element * item_bytes(need) + body);
}

void append_staged(std::vector<int64_t>& staged, const Need& need, const Box& box, uint64_t offset) {
  staged.push_back(static_cast<int64_t>(offset));
  append(staged, need.row.first(Need::kHead));
  append(staged, need.chunk());
  append(staged, box.offset);
  append(staged, box.size);
}

void append_place(std::vector<int64_t>& places, int64_t peer, uint64_t offset, const Piece::Receiver& to,
                  const Box& lies) {
  const Need& need = *to.need;
  append(places, std::array{peer, static_cast<int64_t>(offset), need.item(), need.dtype(),
                            static_cast<int64_t>(to.box.size.size())});
  append(places, lies.size);
  for (size_t dim = 0; dim < need.dims(); ++dim) places.push_back(to.box.offset[dim] - lies.offset[dim]);
  append(places, to.box.size);
  for (size_t dim = 0; dim < need.dims(); ++dim) {
    places.push_back(need.target()[dim] + to.box.offset[dim] - need.box_offset()[dim]);
  }
}

uint64_t bytes_read_for(const Need& need, const Box& box, bool verify) {
  uint64_t slice = item_bytes(need);  // bytes of the chunk's dimensions that follow
  uint64_t outer = box.elements();
  if (verify && need.crc() == kUnknownCrc) {  // can only be checked as a whole
    return std::accumulate(need.chunk().begin(), need.chunk().end(), slice, std::multiplies<uint64_t>());
  }
  for (size_t dim = box.size.size(); dim-- > 0;) {
    const auto size = static_cast<uint64_t>(box.size[dim]), length = static_cast<uint64_t>(need.chunk()[dim]);
    outer /= std::max<uint64_t>(size, 1);
    const uint64_t run = size * slice, gap = (length - size) * slice;
    if (outer <= 1 || gap >= (verify ? format::kChecksumBlock : io::kReadGap)) {
      return outer * (verify && run < length * slice ? run + format::kChecksumBlock : run);
    }
    slice *= length;
  }
  return slice;
}

uint64_t max_piece_bytes(size_t senders, const RouteOptions& options) {
  constexpr uint64_t kLeast = 4 << 20;  // below this, readers take turns instead
  constexpr uint64_t kElement = 64;     // bytes; an upper bound for all dtypes
  const uint64_t most = std::max(options.piece_bytes, kElement);
  const uint64_t least = std::min({kLeast, most, std::max(options.budget_bytes / 2, kElement)});
  return std::clamp(options.budget_bytes / (senders + 2), least, most);
}

Pieces cut_pieces(std::span<const Need> needs, size_t senders, const RouteOptions& options,
                  std::span<RankRoutes> routes, std::span<uint64_t> own_bytes) {
  Cutter cutter(senders, options, routes, own_bytes);
  for (size_t begin = 0; begin < needs.size();) {
    size_t end = begin + 1;
    while (end < needs.size() && same_record(needs[begin], needs[end])) ++end;
    cutter.cut(needs.subspan(begin, end - begin));
    begin = end;
  }
  return cutter.take();
}

std::deque<Need> expand_replicas(Pieces& pieces) {
  std::deque<Need> needs;
  std::map<uint32_t, const Replicas*> by_rank;
  for (Piece& piece : pieces.pieces) {
    std::vector<Piece::Receiver> all;
    for (const Piece::Receiver& receiver : piece.receivers) {
      const Need& need = *receiver.need;
      by_rank.emplace(need.rank, need.replicas);
      if (need.replicas->ranks.size() == 1) continue;
      for (const uint32_t rank : need.replicas->ranks) {
        if (rank == need.rank) continue;
        needs.push_back(need);
        needs.back().rank = rank;
        all.push_back({&needs.back(), receiver.box});
      }
    }
    if (all.empty()) continue;
    piece.receivers.insert(piece.receivers.end(), all.begin(), all.end());
    std::ranges::stable_sort(piece.receivers, {}, [](const Piece::Receiver& to) { return to.need->rank; });
  }
  for (std::vector<uint32_t>& set : pieces.sets) {
    std::vector<uint32_t> all;
    for (const uint32_t rank : set) {
      const auto found = by_rank.find(rank);
      if (found != by_rank.end()) all.insert(all.end(), found->second->ranks.begin(), found->second->ranks.end());
    }
    std::ranges::sort(all);
    set = std::move(all);
  }
  return needs;
}

void split_among_nodes(Pieces& all, std::span<const RankReads> ranks, size_t most_nodes) {
  std::vector<std::map<uint32_t, uint32_t>> parts_of(all.sets.size());  // {node: new set} of each set that is split
  for (size_t set = 0; set < parts_of.size(); ++set) {
    std::map<uint32_t, uint32_t>& part_of = parts_of[set];
    for (const uint32_t rank : all.sets[set]) part_of[ranks[rank].node] = 0;
    const size_t nodes = part_of.size(), parts = (nodes + most_nodes - 1) / most_nodes;
    if (parts <= 1) {
      part_of.clear();
      continue;
    }
    size_t number = 0;
    for (auto& [node, part] : part_of) part = static_cast<uint32_t>(all.sets.size() + number++ * parts / nodes);
    all.sets.resize(all.sets.size() + parts);
    for (const uint32_t rank : std::exchange(all.sets[set], {})) {
      all.sets[part_of.at(ranks[rank].node)].push_back(rank);
    }
  }
  std::vector<Piece> pieces;
  for (Piece& piece : all.pieces) {
    const std::map<uint32_t, uint32_t>& part_of = parts_of[piece.set];
    if (part_of.empty()) {
      pieces.push_back(std::move(piece));
      continue;
    }
    std::map<uint32_t, std::vector<Piece::Receiver>> receivers;  // by set
    for (Piece::Receiver& to : std::exchange(piece.receivers, {})) {
      receivers[part_of.at(ranks[to.need->rank].node)].push_back(std::move(to));
    }
    for (auto& [set, of_part] : receivers) {
      Piece& part = pieces.emplace_back(piece);
      part.set = set;
      part.receive(std::move(of_part));
    }
  }
  all.pieces = std::move(pieces);
}

}  // namespace vescale_ckpt::share
