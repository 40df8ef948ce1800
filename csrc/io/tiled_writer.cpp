// FileWriter's other layout: tensors without a gap, as safetensors wants them. Segments are cut where it suits the
// disk, so one may hold the end of one tensor and the start of the next, and checksums are put together at the end.
#include <algorithm>
#include <cstring>
#include <utility>

#include "io/crc32.h"
#include "io/writer.h"

namespace vescale_ckpt {

class FileWriter::TiledGroup {
 public:
  TiledGroup(FileWriter& writer, std::span<const RecordSource> sources, uint64_t offset)
      : writer_(writer), sources_(sources) {
    lay_out(offset);
  }

  void run() {
    queue_.expect(segments_.size());
    for (size_t index = 0; index < segments_.size(); ++index) queue_.push(index);
    run_transfers(
        queue_, writer_.options_, [this](size_t index) { return !in_place(segments_[index]); },
        [this](size_t index, Flight& flight) { prepare(segments_[index], flight); },
        [this](Flight& flight) {
          writer_.stats_.count(flight, flight.transfer.size);
          writer_.file_->nudge_writeback(flight.transfer.offset, flight.transfer.size);
        },
        &writer_.control_);
  }

  uint64_t end() const { return end_; }

  // Pieces of one cell of one source are one block.
  std::vector<uint32_t> blocks() const {
    std::vector<uint32_t> blocks;
    const Part* before = nullptr;
    for (const Segment& segment : segments_) {
      for (const Part& part : segment.parts) {
        bool same = before != nullptr && before->source == part.source && part.offset % kChecksumBlock != 0;
        size_t piece = part.first_piece;
        for_each_cell(part, [&](uint64_t, uint64_t bytes) {
          const uint32_t crc = pieces_[piece++];
          if (same) {
            blocks.back() = crc32_combine(blocks.back(), crc, bytes);
          } else {
            blocks.push_back(crc);
          }
          same = false;
        });
        before = &part;
      }
    }
    return blocks;
  }

 private:
  // A piece of one source within one segment.
  struct Part {
    size_t source;
    uint64_t offset;      // in the file
    uint64_t begin, end;  // in the source
    size_t first_piece;   // checksum of its part of each cell
  };

  // One transfer: a block-aligned range of the file.
  struct Segment {
    uint64_t begin = 0, end = 0;
    std::vector<Part> parts;
    bool interior = false;  // the inside of one large source: one part that fills it
  };

  void lay_out(uint64_t offset) {
    uint64_t at = offset;
    segment_.begin = align_down(offset, kBlock);
    for (size_t source = 0; source < sources_.size(); ++source) {
      const uint64_t bytes = sources_[source].bytes, end = at + bytes;
      if (bytes < kLargeBody) {
        add_packed(source, at, 0, bytes);
      } else {
        const uint64_t interior_end = align_down(end, kBlock);
        uint64_t next = align_up(at, kBlock);
        add_packed(source, at, 0, next - at);
        close_segment(next);
        while (next < interior_end) {
          const uint64_t cut = align_down(next, writer_.options_.slot_bytes) + writer_.options_.slot_bytes;
          const uint64_t stop = std::min(cut, interior_end);
          segment_.interior = true;
          add(source, next, next - at, stop - at);
          close_segment(stop);
          next = stop;
        }
        add_packed(source, at, interior_end - at, bytes);
      }
      at = end;
    }
    close_segment(at);
    end_ = at;
  }

  // Bytes [from, to) of a source that lies at `at`, through slots: as many as it needs.
  void add_packed(size_t source, uint64_t at, uint64_t from, uint64_t to) {
    while (from < to) {
      const uint64_t limit = segment_.begin + writer_.options_.slot_bytes;
      const uint64_t stop = std::min(to, limit - at);
      add(source, at + from, from, stop);
      if (at + stop == limit) close_segment(limit);
      from = stop;
    }
  }

  void add(size_t source, uint64_t offset, uint64_t begin, uint64_t end) {
    const Part part{source, offset, begin, end, pieces_.size()};
    pieces_.resize(pieces_.size() + cells(offset, offset + (end - begin)));
    segment_.parts.push_back(part);
  }

  void close_segment(uint64_t end) {
    segment_.end = align_up(end, kBlock);
    const uint64_t next = segment_.end;
    if (!segment_.parts.empty()) segments_.push_back(std::move(segment_));
    segment_ = {};
    segment_.begin = next;
  }

  template <typename Work>
  static void for_each_cell(const Part& part, const Work& work) {  // (bytes from the part's start, bytes)
    const uint64_t end = part.offset + (part.end - part.begin);
    for (uint64_t at = part.offset; at < end;) {
      const uint64_t next = std::min(end, align_down(at, kChecksumBlock) + kChecksumBlock);
      work(at - part.offset, next - at);
      at = next;
    }
  }

  bool in_place(const Segment& segment) const {
    return segment.interior && writer_.can_send(sources_[segment.parts[0].source].data + segment.parts[0].begin);
  }

  void prepare(const Segment& segment, Flight& flight) {
    flight.transfer.call = Call::write;
    flight.transfer.file = writer_.file_.get();
    flight.transfer.offset = segment.begin;
    flight.transfer.size = flight.transfer.needed = segment.end - segment.begin;
    if (!flight.slot) {
      const Part& part = segment.parts[0];
      flight.transfer.data = const_cast<std::byte*>(sources_[part.source].data + part.begin);
      take(part, nullptr);
      return;
    }
    std::byte* slot = flight.slot->data();
    flight.transfer.data = slot;
    uint64_t at = segment.begin;  // only before the first part and behind the last one is something else
    std::memset(slot, 0, segment.parts.front().offset - at);
    for (const Part& part : segment.parts) {
      take(part, slot + (part.offset - segment.begin));
      at = part.offset + (part.end - part.begin);
    }
    std::memset(slot + (at - segment.begin), 0, segment.end - at);
  }

  // Checksums a part, copying it on the way if there is where to.
  void take(const Part& part, std::byte* out) {
    const std::byte* data = sources_[part.source].data + part.begin;
    if (!writer_.checksums_) {
      if (out != nullptr) std::memcpy(out, data, part.end - part.begin);
      return;
    }
    size_t piece = part.first_piece;
    for_each_cell(part, [&](uint64_t from, uint64_t bytes) {
      pieces_[piece++] = out != nullptr ? copy_crc32(out + from, data + from, bytes, 0) : crc32(0, data + from, bytes);
    });
  }

  FileWriter& writer_;
  const std::span<const RecordSource> sources_;
  std::vector<Segment> segments_;
  Segment segment_;
  std::vector<uint32_t> pieces_;  // workers write each their own
  uint64_t end_ = 0;
  WorkQueue<size_t> queue_;
};

std::vector<uint32_t> FileWriter::write_tiled(std::span<const RecordSource> sources, uint64_t offset) {
  TiledGroup group(*this, sources, offset);
  group.run();
  cursor_ = group.end();
  return group.blocks();
}

uint64_t FileWriter::finish_tiled(std::span<const std::byte> head, bool sync) {
  control_.check();
  write_exactly(*file_, 0, head);
  return seal(cursor_, sync);
}

}  // namespace vescale_ckpt
