#include "write/tiles.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "base/crc32.h"
#include "base/memory.h"
#include "write/writer.h"

namespace vescale_ckpt::write {
namespace {

// Runs of a box that are shorter go through the page cache, many for one segment.
constexpr uint64_t kLongRun = 512 << 10;
// What follows one another in a file and is shorter, too: one call instead of one for each end and the middle.
constexpr uint64_t kShortExtent = 64 << 10;

class Tiles {
 public:
  Tiles(std::span<const TileSource> sources, TileEdges edges, const io::EngineOptions& options,
        io::TransferControl& control, io::TransferStats& stats)
      : edges_(edges), options_(options), control_(control), stats_(stats) {
    for (const TileSource& source : sources) add(source);
    close_extent();
  }

  // What shares blocks with others comes first: many small writes, which the disk does while the rest is sent.
  void run() {
    const auto edge = [this](const Segment& segment) { return segment.kind != Kind::scattered && by_cache(segment); };
    std::ranges::stable_partition(segments_, edge);
    edges_left_ = static_cast<size_t>(std::ranges::count_if(segments_, edge));
    queue_.expect(segments_.size());
    for (size_t index = 0; index < segments_.size(); ++index) queue_.push(index);
    io::run_transfers(
        queue_, options_, [this](size_t index) { return needs_slot(segments_[index]); },
        [this](size_t index, io::Flight& flight) { prepare(segments_[index], flight); },
        [this](io::Flight& flight) {
          stats_.count(flight, flight.transfer.size + flight.moved_before);
          flight.transfer.file->nudge_writeback(flight.transfer.offset, flight.transfer.size);
          if (flight.item != nullptr && --edges_left_ == 0) write_back();
        },
        &control_);
  }

 private:
  // Bytes [begin, end) of a source's tensor: one run of the file.
  struct Part {
    const TileSource* source;
    uint64_t begin, end;
    uint64_t offset() const { return source->place.begin + begin; }  // in the file
    uint64_t bytes() const { return end - begin; }
  };

  enum class Kind {
    packed,     // parts, one behind another
    interior,   // the inside of one part, aligned
    scattered,  // the short runs of one source's box that lie in its only part
  };

  // One transfer: a range of a file. Shared and not of whole blocks: through the page cache.
  struct Segment {
    Kind kind = Kind::packed;
    uint64_t begin = 0, end = 0;
    size_t first_part = 0, parts = 0;
  };

  // --- Layout. What follows one another in a file without a gap is an extent.

  void add(const TileSource& source) {
    const io::Box* box = source.box;
    if (box == nullptr) {
      add_run({&source, 0, source.place.end - source.place.begin});
    } else if (box->run_bytes() == box->end() - box->begin()) {
      add_run({&source, box->begin(), box->end()});
    } else if (box->run_bytes() >= kLongRun) {
      box->ranges(0, [&](uint64_t begin, uint64_t end) { add_run({&source, begin, end}); });
    } else {
      add_scattered(source);
    }
  }

  void add_run(const Part& run) {
    if (run.bytes() == 0) return;
    if (!extent_.empty()) {
      const Part& last = extent_.back();
      if (last.source->place.file != run.source->place.file || last.offset() + last.bytes() != run.offset()) {
        close_extent();
      }
    }
    extent_.push_back(run);
  }

  void add_scattered(const TileSource& source) {
    Part part{&source, 0, 0};
    const auto close = [&] {
      if (part.bytes() == 0) return;
      segments_.push_back({Kind::scattered, part.offset(), part.offset() + part.bytes(), parts_.size(), 1});
      parts_.push_back(part);
    };
    source.box->ranges(0, [&](uint64_t begin, uint64_t end) {
      if (end - part.begin > options_.slot_bytes || part.bytes() == 0) {
        close();
        part.begin = begin;
      }
      part.end = end;
    });
    close();
  }

  void close_extent() {
    if (extent_.empty()) return;
    const uint64_t begin = extent_.front().offset(), end = extent_.back().offset() + extent_.back().bytes();
    const bool shared = edges_ == TileEdges::shared;
    whole_ = shared && end - begin < kShortExtent;
    head_end_ = shared ? align_up(begin, kBlock) : 0;
    tail_begin_ = shared ? align_down(end, kBlock) : UINT64_MAX;
    open_segment(shared ? begin : align_down(begin, kBlock));
    for (const Part& run : extent_) {
      if (whole_ || run.bytes() < io::kLargeBody) {
        add_packed(run);
        continue;
      }
      const uint64_t at = run.offset() - run.begin;  // the tensor, in the file
      const uint64_t interior = align_up(run.offset(), kBlock), interior_end = align_down(at + run.end, kBlock);
      add_packed({run.source, run.begin, interior - at});
      close_segment(interior);
      for (uint64_t next = interior; next < interior_end;) {
        const uint64_t stop = std::min(align_down(next, options_.slot_bytes) + options_.slot_bytes, interior_end);
        segment_.kind = Kind::interior;
        take_part({run.source, next - at, stop - at});
        close_segment(stop);
        next = stop;
      }
      add_packed({run.source, interior_end - at, run.end});
    }
    close_segment(end);
    extent_.clear();
  }

  void add_packed(Part part) {
    while (part.bytes() != 0) {
      const uint64_t limit = segment_limit();
      const uint64_t stop = std::min(part.end, part.begin + (limit - part.offset()));
      take_part({part.source, part.begin, stop});
      part.begin = stop;
      if (part.offset() == limit) close_segment(limit);
    }
  }

  // Where the segment must end: a slot holds so much, and what others may write to begins or ends.
  uint64_t segment_limit() const {
    const uint64_t slot = align_down(segment_.begin, kBlock) + options_.slot_bytes;
    if (whole_) return slot;
    if (segment_.begin < head_end_) return head_end_;
    return segment_.begin < tail_begin_ ? std::min(slot, tail_begin_) : slot;
  }

  void take_part(const Part& part) {
    parts_.push_back(part);
    ++segment_.parts;
  }

  void open_segment(uint64_t begin) {
    segment_ = {};
    segment_.begin = begin;
    segment_.first_part = parts_.size();
  }

  void close_segment(uint64_t end) {
    segment_.end = edges_ == TileEdges::ours ? align_up(end, kBlock) : end;
    const uint64_t next = segment_.end;
    if (segment_.parts != 0) segments_.push_back(segment_);
    open_segment(next);
  }

  // --- Sending.

  std::span<const Part> parts_of(const Segment& segment) const {
    return std::span(parts_).subspan(segment.first_part, segment.parts);
  }

  // Whether a part's bytes lie one behind another in memory, too, and where.
  static const std::byte* contiguous(const Part& part) {
    const TileSource& source = *part.source;
    if (source.box == nullptr) return source.data + part.begin;
    return source.box->dense() ? source.data + (part.begin - source.box->begin()) : nullptr;
  }

  bool needs_slot(const Segment& segment) const {
    const Part& part = parts_[segment.first_part];
    if (segment.kind == Kind::scattered) return !part.source->box->runs_are_dense();
    const std::byte* data = contiguous(part);
    return segment.parts != 1 || data == nullptr || part.bytes() != segment.end - segment.begin ||
           !(by_cache(segment) || can_send(*part.source->place.file, data));
  }

  bool by_cache(const Segment& segment) const {
    return edges_ == TileEdges::shared && (segment.begin % kBlock != 0 || segment.end % kBlock != 0 || whole_);
  }

  static bool can_send(const io::File& file, const std::byte* data) {
    return file.access() != io::Access::direct || reinterpret_cast<uintptr_t>(data) % file.memory_alignment() == 0;
  }

  void write_back() {
    io::File* last = nullptr;
    for (const Segment& segment : segments_) {
      io::File* file = parts_[segment.first_part].source->place.file;
      if (file != last) file->write_back();
      last = file;
    }
  }

  void prepare(const Segment& segment, io::Flight& flight) {
    const std::span<const Part> parts = parts_of(segment);
    flight.transfer.call = Call::write;
    flight.transfer.file = parts[0].source->place.file;
    flight.transfer.offset = segment.begin;
    flight.transfer.size = flight.transfer.needed = segment.end - segment.begin;
    flight.transfer.part_of_block = by_cache(segment);
    if (flight.transfer.part_of_block && segment.kind != Kind::scattered) flight.item = &segment;
    if (segment.kind == Kind::scattered) {
      send_runs(parts[0], flight);
    } else if (!flight.slot) {
      flight.transfer.data = const_cast<std::byte*>(contiguous(parts[0]));
      checksum(parts[0].source->place, parts[0].begin, flight.transfer.data, parts[0].bytes(), nullptr);
    } else {
      flight.transfer.data = flight.slot->data();
      fill(segment, flight.slot->data());
    }
  }

  void fill(const Segment& segment, std::byte* slot) {
    uint64_t at = segment.begin;  // only before the first part and behind the last one is something else
    for (const Part& part : parts_of(segment)) {
      std::byte* out = slot + (part.offset() - segment.begin);
      std::memset(slot + (at - segment.begin), 0, part.offset() - at);
      if (const std::byte* data = contiguous(part)) {
        checksum(part.source->place, part.begin, data, part.bytes(), out);
      } else {
        part.source->box->gather(out, part.begin, part.end, part.source->data);
        checksum(part.source->place, part.begin, out, part.bytes(), nullptr);
      }
      at = part.offset() + part.bytes();
    }
    std::memset(slot + (at - segment.begin), 0, segment.end - at);
  }

  // All runs but the last are written here: through the page cache that is a copy.
  void send_runs(const Part& part, io::Flight& flight) {
    const TileSource& source = *part.source;
    io::Transfer& last = flight.transfer;
    last.size = 0;
    last.part_of_block = true;
    if (flight.slot) source.box->gather(flight.slot->data(), part.begin, part.end, source.data);
    source.box->runs(part.begin, part.end, [&](uint64_t begin, int64_t memory, uint64_t bytes) {
      const std::byte* data = flight.slot ? flight.slot->data() + (begin - part.begin) : source.data + memory;
      checksum(source.place, begin, data, bytes, nullptr);
      if (last.size != 0) {
        io::write_exactly(*last.file, last.offset, {last.data, last.size});
        flight.moved_before += last.size;
      }
      last.offset = source.place.begin + begin;
      last.data = const_cast<std::byte*>(data);
      last.size = last.needed = bytes;
    });
  }

  // Adds bytes of a tensor, from `begin` on, to the checksums of its blocks, copying them on the way if there is where
  // to.
  static void checksum(const TensorPlace& place, uint64_t begin, const std::byte* data, uint64_t bytes,
                       std::byte* out) {
    if (place.blocks.empty()) {
      if (out != nullptr) std::memcpy(out, data, bytes);
      return;
    }
    for (uint64_t at = place.begin + begin, end = at + bytes; at < end;) {
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

  const TileEdges edges_;
  const io::EngineOptions& options_;
  io::TransferControl& control_;
  io::TransferStats& stats_;
  std::vector<Part> extent_;
  bool whole_ = false;  // the extent goes through the page cache
  uint64_t head_end_ = 0, tail_begin_ = 0;
  Segment segment_;
  std::vector<Part> parts_;
  std::vector<Segment> segments_;
  std::atomic<size_t> edges_left_{0};
  WorkQueue<size_t> queue_;
};

}  // namespace

void write_tiles(std::span<const TileSource> sources, TileEdges edges, const io::EngineOptions& options,
                 io::TransferControl& control, io::TransferStats& stats) {
  Tiles(sources, edges, options, control, stats).run();
}

}  // namespace vescale_ckpt::write
