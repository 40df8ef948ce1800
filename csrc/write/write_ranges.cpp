#include "write/write_ranges.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "base/crc32.h"
#include "base/error.h"
#include "base/memory.h"

namespace vescale_ckpt::write {
namespace {

// Shorter extents of a shared file also go through the page cache: one call instead of three (head, middle, tail).
constexpr uint64_t kShortExtent = 64 << 10;

class Ranges {
 public:
  Ranges(std::span<const PlacedTensor> sources, Edges edges, const io::EngineOptions& options,
         io::TransferControl& control, io::TransferStats& stats)
      : shared_(edges == Edges::shared), options_(options), control_(control), stats_(stats) {
    for (const PlacedTensor& source : sources) add(source);
    close_extent();
    if (!shared_) interleave();
  }

  // Edges first: many small writes, which the disk completes while the rest is sent.
  void run() {
    check_no_hole();
    queue_.expect(ranges_.size());
    for (const bool edges : {true, false}) {
      for (size_t index = 0; index < ranges_.size(); ++index) {
        const Range& range = ranges_[index];
        if ((range.way == Way::edge) != edges || range.awaited != 0) continue;
        if (edges) ++edges_left_;
        queue_.push(index);
      }
    }
    io::run_transfers(
        queue_, options_,
        [this](size_t index) {
          wait_for_room(ranges_[index]);
          return needs_slot(ranges_[index]);
        },
        [this](size_t index, io::Flight& flight) { prepare(ranges_[index], flight); },
        [this](io::Flight& flight) {
          stats_.count(flight, flight.transfer.size + flight.moved_before);
          flight.transfer.file->start_writeback(flight.transfer.offset, flight.transfer.size);
          const bool edge = static_cast<const Range*>(flight.item)->way == Way::edge;
          if (edge && --edges_left_ == 0) write_back();
        },
        &control_);
  }

 private:
  // Bytes [begin, end) of a file from one source: from its prologue, its tensor or its epilogue.
  struct Part {
    const PlacedTensor* source;
    uint64_t begin, end;
    uint64_t bytes() const { return end - begin; }
    uint64_t body() const { return begin - source->place.begin; }  // offset in the tensor
    bool is_epilogue() const { return begin >= source->place.end; }
  };

  enum class Way {
    blocks,  // whole blocks that no other writer shares
    edge,    // an unaligned range, through the page cache
    runs,    // the short runs of one source's box, all in the range's only part
  };

  // One transfer: a range of a file.
  struct Range {
    uint64_t begin = 0, end = 0;
    size_t first_part = 0, parts = 0;
    Way way = Way::blocks;
    // For a range with an epilogue: how many other ranges with pieces of that tensor are not yet checksummed.
    uint32_t awaited = 0;
    size_t waiter = 0;  // the range that waits for this one; 0: none, as range 0 never waits
  };

  // --- Layout. An extent is a sequence of runs in one file; in a shared file it has no gaps.

  void add(const PlacedTensor& source) {
    const TensorPlace& place = source.place;
    const io::Box* box = source.box;
    if (source.apart) close_extent();
    add_run({&source, source.begin(), place.begin});
    if (box == nullptr) {
      add_run({&source, place.begin, place.end});
    } else if (box->run_bytes() == box->end() - box->begin()) {
      add_run({&source, place.begin + box->begin(), place.begin + box->end()});
    } else if (box->run_bytes() >= kShortRun) {
      box->runs(box->begin(), box->end(), [&](uint64_t at, int64_t, uint64_t bytes) {
        add_run({&source, place.begin + at, place.begin + at + bytes});
      });
    } else {
      add_scattered(source);
    }
    add_run({&source, place.end, source.end()});
  }

  void add_run(const Part& run) {
    if (run.bytes() == 0) return;
    if (!extent_.empty()) {
      const Part& last = extent_.back();
      if (last.source->place.file != run.source->place.file || (shared_ && last.end != run.begin)) close_extent();
    }
    extent_.push_back(run);
  }

  void add_scattered(const PlacedTensor& source) {
    Part part{&source, 0, 0};
    const auto close = [&] {
      if (part.bytes() == 0) return;
      ranges_.push_back({part.begin, part.end, parts_.size(), 1, Way::runs});
      parts_.push_back(part);
    };
    source.box->runs(source.box->begin(), source.box->end(), [&](uint64_t begin, int64_t, uint64_t bytes) {
      const uint64_t end = begin + bytes;
      if (source.place.begin + end - part.begin > options_.slot_bytes || part.bytes() == 0) {
        close();
        part.begin = source.place.begin + begin;
      }
      part.end = source.place.begin + end;
    });
    close();
  }

  void close_extent() {
    if (extent_.empty()) return;
    const uint64_t begin = extent_.front().begin, end = extent_.back().end;
    whole_ = shared_ && end - begin < kShortExtent;
    head_end_ = shared_ ? align_up(begin, kBlock) : 0;
    tail_begin_ = shared_ ? align_down(end, kBlock) : UINT64_MAX;
    open_range(shared_ ? begin : align_down(begin, kBlock));
    for (const Part& run : extent_) {
      if (whole_ || run.bytes() < io::kLargeBody) {
        add_packed(run);
        continue;
      }
      // The unaligned head of a large run joins the preceding range, its tail the following one. The interior is split
      // at multiples of the slot size.
      const uint64_t interior = align_up(run.begin, kBlock), interior_end = align_down(run.end, kBlock);
      add_packed({run.source, run.begin, interior});
      close_range(interior);
      for (uint64_t next = interior; next < interior_end;) {
        const uint64_t stop = std::min(align_down(next, options_.slot_bytes) + options_.slot_bytes, interior_end);
        take_part({run.source, next, stop});
        close_range(stop);
        next = stop;
      }
      add_packed({run.source, interior_end, run.end});
    }
    close_range(end);
    extent_.clear();
  }

  void add_packed(Part part) {
    while (part.bytes() != 0) {
      const uint64_t limit = range_limit();
      const uint64_t stop = std::min(part.end, limit);
      take_part({part.source, part.begin, stop});
      part.begin = stop;
      if (stop == limit) close_range(limit);
    }
  }

  // The largest end of the current range: limited by the slot, and by the borders of blocks that others may write.
  uint64_t range_limit() const {
    const uint64_t slot = align_down(range_.begin, kBlock) + options_.slot_bytes;
    if (whole_) return slot;
    if (range_.begin < head_end_) return head_end_;
    return range_.begin < tail_begin_ ? std::min(slot, tail_begin_) : slot;
  }

  void take_part(const Part& part) {
    parts_.push_back(part);
    ++range_.parts;
    const TensorPlace& place = part.source->place;
    if (place.blocks.empty()) return;
    if (part.begin == place.begin) body_range_ = ranges_.size();
    if (!part.is_epilogue()) return;
    range_.awaited = static_cast<uint32_t>(ranges_.size() - body_range_);
    for (; body_range_ < ranges_.size(); ++body_range_) ranges_[body_range_].waiter = ranges_.size();
  }

  void open_range(uint64_t begin) {
    range_ = {};
    range_.begin = begin;
    range_.first_part = parts_.size();
  }

  void close_range(uint64_t end) {
    range_.end = shared_ ? end : align_up(end, kBlock);
    if (whole_ || range_.begin % kBlock != 0 || range_.end % kBlock != 0) range_.way = Way::edge;
    const uint64_t next = range_.end;
    if (range_.parts != 0) ranges_.push_back(range_);
    open_range(next);
  }

  // Writes to one file may serialize on its inode, so ranges of several files alternate.
  void interleave() {
    if (ranges_.empty() || file_of(ranges_.front()) == file_of(ranges_.back())) return;
    std::vector<size_t> number(ranges_.size()), order(ranges_.size()), place(ranges_.size());  // number: in its file
    for (size_t at = 1; at < ranges_.size(); ++at) {
      number[at] = file_of(ranges_[at]) == file_of(ranges_[at - 1]) ? number[at - 1] + 1 : 0;
    }
    std::iota(order.begin(), order.end(), size_t{0});
    std::ranges::stable_sort(order, {}, [&](size_t at) { return number[at]; });
    std::vector<Range> ordered;
    for (const size_t at : order) {
      place[at] = ordered.size();
      ordered.push_back(ranges_[at]);
    }
    for (Range& range : ordered) {
      if (range.waiter != 0) range.waiter = place[range.waiter];
    }
    ranges_ = std::move(ordered);
  }

  io::File* file_of(const Range& range) const { return parts_[range.first_part].source->place.file; }

  // --- Sending.

  std::span<const Part> parts_of(const Range& range) const {
    return std::span(parts_).subspan(range.first_part, range.parts);
  }

  // The address of a part that is contiguous in memory; null for strided boxes, and for epilogues, which are generated.
  static const std::byte* contiguous(const Part& part) {
    const PlacedTensor& source = *part.source;
    if (part.begin < source.place.begin) {
      return reinterpret_cast<const std::byte*>(source.framing->prologue().data()) + (part.begin - source.begin());
    }
    if (part.is_epilogue()) return nullptr;
    if (source.box == nullptr) return source.data + part.body();
    return source.box->dense() ? source.data + (part.body() - source.box->begin()) : nullptr;
  }

  // A remote file is sent in order, so writers may run ahead of it only by a bounded window (io/remote.h). They wait
  // before they take a slot, so a holder of a slot never blocks. This cannot deadlock, because the lowest unwritten
  // range is always taken next, and always has room:
  // - If it was ready from the start, no higher range was taken before it, because the queue is ordered.
  // - If it waited for pieces of its tensor, these are lower, and so already written. The writer that prepared the last
  //   of them queued this range in order, wrote that piece, and takes the lowest range of the queue next.
  void wait_for_room(const Range& range) {
    io::PartWindow* window = parts_[range.first_part].source->place.file->window();
    if (window != nullptr) window->wait_for_room(range.end, [this] { return queue_.closed(); });
  }

  bool needs_slot(const Range& range) const {
    if (range.way == Way::runs) return true;
    io::PartWindow* window = parts_[range.first_part].source->place.file->window();
    if (window != nullptr) return window->place(range.begin, range.end - range.begin) == nullptr;
    return own_memory(range) == nullptr;
  }

  // The address from which a range can be written without a copy; null for memory that another thread may modify
  // between the read for the checksum and the one by the kernel.
  const std::byte* own_memory(const Range& range) const {
    const Part& part = parts_[range.first_part];
    if (!part.source->unchanging || part.begin != range.begin || part.end != range.end) return nullptr;
    const std::byte* data = contiguous(part);
    const io::File& file = *part.source->place.file;
    const bool fits =
        file.access() != io::Access::direct || reinterpret_cast<uintptr_t>(data) % file.memory_alignment() == 0;
    return fits ? data : nullptr;
  }

  // A remote part with a hole would never complete.
  void check_no_hole() const {
    for (size_t index = 1; index < ranges_.size(); ++index) {
      const io::File& file = *parts_[ranges_[index].first_part].source->place.file;
      if (file.window() != nullptr && ranges_[index].begin != ranges_[index - 1].end) {
        throw Error::invalid("the layout of " + file.path() + " has a hole at " +
                             std::to_string(ranges_[index - 1].end));
      }
    }
  }

  void write_back() {
    io::File* last = nullptr;
    for (const Range& range : ranges_) {
      io::File* file = parts_[range.first_part].source->place.file;
      if (file != last) file->write_back();
      last = file;
    }
  }

  void prepare(const Range& range, io::Flight& flight) {
    const Part& first = parts_[range.first_part];
    flight.item = &range;
    flight.transfer.call = Call::write;
    flight.transfer.file = first.source->place.file;
    flight.transfer.offset = range.begin;
    flight.transfer.size = flight.transfer.needed = range.end - range.begin;
    flight.transfer.part_of_block = range.way != Way::blocks;
    if (range.way == Way::runs) {
      send_runs(first, flight);
    } else if (io::PartWindow* window = flight.transfer.file->window(); flight.slot || window != nullptr) {
      flight.transfer.data = flight.slot ? flight.slot->data() : window->place(range.begin, flight.transfer.size);
      fill(range, flight.transfer.data);
    } else {
      const std::byte* data = own_memory(range);
      flight.transfer.data = const_cast<std::byte*>(data);
      add_checksum(first.source->place, first.begin, data, first.bytes(), nullptr);
    }
    if (range.waiter == 0) return;
    const std::atomic_ref awaited(ranges_[range.waiter].awaited);
    if (awaited.fetch_sub(1, std::memory_order_acq_rel) == 1) queue_.push_in_order(range.waiter);
  }

  void fill(const Range& range, std::byte* slot) {
    uint64_t at = range.begin;
    for (const Part& part : parts_of(range)) {
      const PlacedTensor& source = *part.source;
      std::byte* out = slot + (part.begin - range.begin);
      std::memset(slot + (at - range.begin), 0, part.begin - at);
      at = part.end;
      if (part.is_epilogue()) {
        source.framing->write_epilogue(format::joined_crc(source.place.begin, source.place.end, source.place.blocks),
                                       out);
      } else if (const std::byte* data = contiguous(part)) {
        add_checksum(source.place, part.begin, data, part.bytes(), out);
      } else {
        source.box->gather(out, part.body(), part.body() + part.bytes(), source.data);
        add_checksum(source.place, part.begin, out, part.bytes(), nullptr);
      }
    }
    std::memset(slot + (at - range.begin), 0, range.end - at);
  }

  // Writes all runs but the last on this thread: a write into the page cache is a memory copy, which gains nothing from
  // a transfer of its own. The last one becomes the transfer of `flight`.
  void send_runs(const Part& part, io::Flight& flight) {
    const PlacedTensor& source = *part.source;
    const uint64_t begin = part.body(), end = begin + part.bytes();
    io::Transfer& last = flight.transfer;
    last.size = 0;
    source.box->gather(flight.slot->data(), begin, end, source.data);
    source.box->runs(begin, end, [&](uint64_t at, int64_t, uint64_t bytes) {
      std::byte* data = flight.slot->data() + (at - begin);
      add_checksum(source.place, source.place.begin + at, data, bytes, nullptr);
      if (last.size != 0) {
        io::write_exactly(*last.file, last.offset, {last.data, last.size});
        flight.moved_before += last.size;
      }
      last.offset = source.place.begin + at;
      last.data = data;
      last.size = last.needed = bytes;
    });
  }

  const bool shared_;
  const io::EngineOptions& options_;
  io::TransferControl& control_;
  io::TransferStats& stats_;
  // State of the layout phase.
  std::vector<Part> extent_;
  bool whole_ = false;  // the extent is so short that all of it is an edge
  uint64_t head_end_ = 0, tail_begin_ = 0;
  Range range_;
  size_t body_range_ = 0;  // the range in which the latest tensor begins
  // Result of the layout phase.
  std::vector<Part> parts_;
  std::vector<Range> ranges_;
  std::atomic<size_t> edges_left_{0};
  WorkQueue<size_t> queue_;
};

}  // namespace

const io::EngineOptions& usable_for_writing(const io::EngineOptions& options) {
  if (options.slot_bytes % format::kChecksumBlock != 0 ||
      options.slot_bytes < io::kLargeBody + format::kChecksumBlock) {
    throw Error::invalid("slots: expected a multiple of " + std::to_string(format::kChecksumBlock) + " bytes from " +
                         std::to_string(io::kLargeBody + format::kChecksumBlock) + " on, got " +
                         std::to_string(options.slot_bytes));
  }
  if (options.niceness < 0 || options.niceness > 19) {
    throw Error::invalid("niceness: expected 0 to 19, got " + std::to_string(options.niceness));
  }
  return options;
}

void add_checksum(const TensorPlace& place, uint64_t at, const std::byte* data, uint64_t bytes, std::byte* out) {
  if (place.blocks.empty() || at < place.begin) {
    if (out != nullptr) std::memcpy(out, data, bytes);
    return;
  }
  for (const uint64_t end = at + bytes; at < end;) {
    const uint64_t block_end = std::min(place.end, align_down(at, format::kChecksumBlock) + format::kChecksumBlock);
    const uint64_t next = std::min(end, block_end), size = next - at;
    const uint32_t crc = out != nullptr ? copy_crc32(out, data, size, 0) : crc32(0, data, size);
    const uint32_t moved = next == block_end ? crc : crc32_combine(crc, 0, block_end - next);
    std::atomic_ref(place.blocks[at / format::kChecksumBlock - place.first_cell])
        .fetch_xor(moved, std::memory_order_relaxed);
    data += size;
    if (out != nullptr) out += size;
    at = next;
  }
}

void write_ranges(std::span<const PlacedTensor> sources, Edges edges, const io::EngineOptions& options,
                  io::TransferControl& control, io::TransferStats& stats) {
  Ranges(sources, edges, options, control, stats).run();
}

}  // namespace vescale_ckpt::write
