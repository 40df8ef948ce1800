#include "write/writer.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/crc32.h"
#include "base/error.h"

namespace vescale_ckpt::write {
namespace {

constexpr uint64_t kRecordAlignment = 64;
constexpr int64_t kNobody = -1;

}  // namespace

const io::EngineOptions& usable_for_writing(const io::EngineOptions& options) {
  if (options.slot_bytes % format::kChecksumBlock != 0 ||
      options.slot_bytes < io::kLargeBody + format::kChecksumBlock) {
    throw Error::invalid("slots of " + std::to_string(options.slot_bytes) + " bytes: a multiple of " +
                         std::to_string(format::kChecksumBlock) + " from " +
                         std::to_string(io::kLargeBody + format::kChecksumBlock) + " on is wanted");
  }
  if (options.niceness < 0 || options.niceness > 19) {
    throw Error::invalid("niceness " + std::to_string(options.niceness) + ": 0 to 19 is wanted");
  }
  return options;
}

// A contiguous piece of one record within one segment.
struct FileWriter::Part {
  enum class Kind { prologue, body, epilogue } kind;
  uint32_t record;
  uint64_t offset;  // in the file
  uint64_t begin;   // body bytes [begin, end); for framing the whole of it
  uint64_t end;
};

// One transfer: a block-aligned range of the file.
struct FileWriter::Segment {
  uint64_t begin = 0;
  uint64_t end = 0;
  std::vector<Part> parts;
  bool interior = false;       // the inside of one large body: one part that fills it
  int64_t waits_on = kNobody;  // the record whose epilogue is here but whose body is also elsewhere
};

struct FileWriter::Record {
  uint64_t offset = 0;       // in the file
  uint64_t body_offset = 0;  // in the file
  uint32_t crc = 0;
  std::vector<uint32_t> blocks;  // checksum of the record's part of each cell
  // For large bodies: what interior segments cover, their number still to be checksummed, and who waits for them.
  uint64_t interior_begin = 0, interior_end = 0;  // in the file
  std::atomic<uint64_t> pending{0};
  int64_t waiter = kNobody;
};

// One call of write(): lays the records out, then prepares and sends their segments.
class FileWriter::Group {
 public:
  Group(FileWriter& writer, std::span<const RecordSource> sources)
      : writer_(writer), sources_(sources), records_(sources.size()) {
    lay_out();
  }

  uint64_t end() const { return end_; }

  void run() {
    queue_.expect(segments_.size());
    for (size_t index = 0; index < segments_.size(); ++index) {
      if (segments_[index].waits_on == kNobody) queue_.push(index);
    }
    io::run_transfers(
        queue_, writer_.options_, [this](size_t index) { return !in_place(segments_[index]); },
        [this](size_t index, io::Flight& flight) { prepare(segments_[index], flight); },
        [this](io::Flight& flight) {
          writer_.stats_.count(flight, flight.transfer.size);
          writer_.file_->nudge_writeback(flight.transfer.offset, flight.transfer.size);
        },
        &writer_.control_);
  }

  std::vector<PlacedRecord> results() {
    std::vector<PlacedRecord> placed;
    placed.reserve(records_.size());
    for (size_t index = 0; index < records_.size(); ++index) {
      Record& record = records_[index];
      if (writer_.checksums_ && !sources_[index].framing) {
        record.crc = crc32(0, sources_[index].data, sources_[index].bytes);
      }
      placed.push_back({record.offset, total_bytes(index), record.crc});
      if (checksummed(index)) {
        writer_.table_.add(record.offset, record.body_offset, sources_[index].bytes, record.crc, record.blocks);
      }
    }
    return placed;
  }

 private:
  // Blocks are for parts of tensors; objects are read whole, and one checksum does.
  bool checksummed(size_t index) const { return writer_.checksums_ && sources_[index].framing != nullptr; }

  uint64_t prologue_bytes(size_t index) const {
    return sources_[index].framing ? sources_[index].framing->prologue().size() : 0;
  }
  uint64_t epilogue_bytes(size_t index) const {
    return sources_[index].framing ? sources_[index].framing->epilogue_bytes() : 0;
  }
  uint64_t total_bytes(size_t index) const {
    return prologue_bytes(index) + sources_[index].bytes + epilogue_bytes(index);
  }

  // --- Layout: see docs/format.md, "Where records lie".

  void lay_out() {
    // Room that a packed segment leaves for the prologue and first bytes of a large record behind it.
    constexpr uint64_t kSlack = 4 * kBlock;
    const uint64_t packed_limit = writer_.options_.slot_bytes - kSlack;
    uint64_t cursor = writer_.cursor_;
    bool after_large = false;
    open_segment(cursor);
    for (size_t index = 0; index < records_.size(); ++index) {
      Record& record = records_[index];
      const uint64_t body = sources_[index].bytes;
      const bool large = body >= io::kLargeBody;
      if (large) {
        const uint64_t least = cursor + prologue_bytes(index);
        record.body_offset = align_up(least - kTorchOffset, kBlock) + kTorchOffset;
        if (least < kTorchOffset) record.body_offset = kTorchOffset;
        record.offset = record.body_offset - prologue_bytes(index);
      } else {
        record.offset = align_up(cursor, kRecordAlignment);
        if (after_large || record.offset + total_bytes(index) - segment_.begin > packed_limit) {
          close_segment(cursor);
          cursor = segment_.begin;
          record.offset = cursor;
        }
        record.body_offset = record.offset + prologue_bytes(index);
      }
      const uint64_t body_end = record.body_offset + body;
      if (checksummed(index)) record.blocks.resize(format::cells(record.body_offset, body_end));
      add(Part::Kind::prologue, index, record.offset, 0, prologue_bytes(index));
      if (large) {
        lay_out_interior(index, body_end);
      } else {
        add(Part::Kind::body, index, record.body_offset, 0, body);
      }
      add(Part::Kind::epilogue, index, body_end, 0, epilogue_bytes(index));
      cursor = body_end + epilogue_bytes(index);
      after_large = large;
    }
    close_segment(cursor);
    end_ = segment_.begin;
  }

  // The head of a large body goes with what is before it, the tail with what is behind it, the rest in pieces that end
  // on multiples of the slot size.
  void lay_out_interior(size_t index, uint64_t body_end) {
    Record& record = records_[index];
    const uint64_t body = record.body_offset;
    record.interior_begin = align_up(body, kBlock);
    record.interior_end = align_down(body_end, kBlock);
    add(Part::Kind::body, index, body, 0, record.interior_begin - body);
    close_segment(record.interior_begin);
    for (uint64_t begin = record.interior_begin; begin < record.interior_end;) {
      const uint64_t next = align_down(begin, writer_.options_.slot_bytes) + writer_.options_.slot_bytes;
      const uint64_t end = std::min(next, record.interior_end);
      add(Part::Kind::body, index, begin, begin - body, end - body);
      segment_.interior = true;
      close_segment(end);
      record.pending.fetch_add(1, std::memory_order_relaxed);
      begin = end;
    }
    add(Part::Kind::body, index, record.interior_end, record.interior_end - body, body_end - body);
    if (checksummed(index)) {
      segment_.waits_on = static_cast<int64_t>(index);
      record.waiter = static_cast<int64_t>(segments_.size());
    }
  }

  void open_segment(uint64_t begin) {
    segment_ = {};
    segment_.begin = segment_.end = begin;
  }

  void add(Part::Kind kind, size_t record, uint64_t offset, uint64_t begin, uint64_t end) {
    if (begin == end && kind != Part::Kind::body) return;
    segment_.parts.push_back({kind, static_cast<uint32_t>(record), offset, begin, end});
  }

  void close_segment(uint64_t end) {
    segment_.end = align_up(end, kBlock);
    const uint64_t next = segment_.end;
    if (segment_.end != segment_.begin) segments_.push_back(std::move(segment_));
    open_segment(next);
  }

  // --- Sending.

  bool in_place(const Segment& segment) const {
    if (!segment.interior) return false;
    const RecordSource& source = sources_[segment.parts[0].record];
    return !source.strided && writer_.can_send(source.data + segment.parts[0].begin);
  }

  void prepare(const Segment& segment, io::Flight& flight) {
    flight.transfer.call = Call::write;
    flight.transfer.file = writer_.file_.get();
    flight.transfer.offset = segment.begin;
    flight.transfer.size = flight.transfer.needed = segment.end - segment.begin;
    if (!flight.slot) {
      const Part& part = segment.parts[0];
      const std::byte* data = sources_[part.record].data + part.begin;
      checksum_cells(part, data, nullptr);
      flight.transfer.data = const_cast<std::byte*>(data);
    } else {
      flight.transfer.data = flight.slot->data();
      fill(segment, flight.slot->data());
    }
    if (segment.interior) finish_interior(segment.parts[0].record);
  }

  void fill(const Segment& segment, std::byte* slot) {
    uint64_t at = segment.begin;
    for (const Part& part : segment.parts) {
      std::memset(slot + (at - segment.begin), 0, part.offset - at);
      std::byte* out = slot + (part.offset - segment.begin);
      const RecordSource& source = sources_[part.record];
      switch (part.kind) {
        case Part::Kind::prologue:
          std::memcpy(out, source.framing->prologue().data(), source.framing->prologue().size());
          break;
        case Part::Kind::body:
          copy_body(segment, part, out);
          break;
        case Part::Kind::epilogue:
          source.framing->write_epilogue(records_[part.record].crc, out);
          break;
      }
      at = part.offset + (part.end - part.begin);
    }
    std::memset(slot + (at - segment.begin), 0, segment.end - at);
  }

  void copy_body(const Segment& segment, const Part& part, std::byte* out) {
    const RecordSource& source = sources_[part.record];
    Record& record = records_[part.record];
    if (source.strided) {
      source.strided->gather(out, part.begin, part.end, source.data);
    }
    const std::byte* contiguous = source.strided ? nullptr : source.data + part.begin;
    if (!checksummed(part.record)) {
      if (contiguous != nullptr && part.end != part.begin) std::memcpy(out, contiguous, part.end - part.begin);
      return;
    }
    const bool large_part = record.interior_end > record.interior_begin;
    if (segment.interior || !large_part) {
      const uint32_t crc =
          checksum_cells(part, contiguous != nullptr ? contiguous : out, contiguous != nullptr ? out : nullptr);
      if (!large_part) record.crc = crc;
      return;
    }
    // The head or the tail of a large body. The head's checksum is made again with the tail's, when all are known.
    const uint64_t bytes = part.end - part.begin;
    if (contiguous != nullptr && bytes != 0) std::memcpy(out, contiguous, bytes);
    if (part.offset >= record.interior_end) combine_large(part.record, crc32(0, out, bytes), bytes);
  }

  // Checksums each cell of a part that lies in cells of its own, copying to `copy_to` on the way if given.
  // Returns the checksum of the whole part.
  uint32_t checksum_cells(const Part& part, const std::byte* data, std::byte* copy_to) {
    if (!checksummed(part.record)) return 0;
    Record& record = records_[part.record];
    uint32_t total = 0;
    uint64_t at = part.offset;
    const uint64_t end = part.offset + (part.end - part.begin);
    while (at < end) {
      const uint64_t next = std::min(end, align_down(at, format::kChecksumBlock) + format::kChecksumBlock);
      const uint64_t bytes = next - at;
      const std::byte* from = data + (at - part.offset);
      const uint32_t crc =
          copy_to != nullptr ? copy_crc32(copy_to + (at - part.offset), from, bytes, 0) : crc32(0, from, bytes);
      record.blocks[at / format::kChecksumBlock - record.body_offset / format::kChecksumBlock] = crc;
      total = at == part.offset ? crc : crc32_combine(total, crc, bytes);
      at = next;
    }
    return total;
  }

  // All cells of a large body have their interior's checksum: add head and tail, make the record's.
  void combine_large(size_t index, uint32_t tail_crc, uint64_t tail_bytes) {
    Record& record = records_[index];
    const uint64_t body = record.body_offset;
    std::byte head[kBlock];
    const uint64_t head_bytes = record.interior_begin - body;
    const RecordSource& source = sources_[index];
    if (source.strided) {
      source.strided->gather(head, 0, head_bytes, source.data);
    } else if (head_bytes != 0) {
      std::memcpy(head, source.data, head_bytes);
    }
    const uint32_t head_crc = crc32(0, head, head_bytes);

    // The cells' interiors are not whole cells at both ends; head and tail may lie in cells of their own.
    uint32_t total = head_crc;
    for (uint64_t at = record.interior_begin; at < record.interior_end;) {
      const uint64_t next =
          std::min(record.interior_end, align_down(at, format::kChecksumBlock) + format::kChecksumBlock);
      uint32_t& cell = record.blocks[at / format::kChecksumBlock - body / format::kChecksumBlock];
      total = crc32_combine(total, cell, next - at);
      at = next;
    }
    total = crc32_combine(total, tail_crc, tail_bytes);
    record.crc = total;

    const uint64_t first_cell_end =
        std::min(record.interior_end, align_down(body, format::kChecksumBlock) + format::kChecksumBlock);
    if (first_cell_end > record.interior_begin) {
      record.blocks.front() = crc32_combine(head_crc, record.blocks.front(), first_cell_end - record.interior_begin);
    } else {
      record.blocks.front() = head_crc;
    }
    if (tail_bytes != 0) {
      const bool shared = record.interior_end % format::kChecksumBlock != 0;  // with interior bytes before it
      record.blocks.back() = shared ? crc32_combine(record.blocks.back(), tail_crc, tail_bytes) : tail_crc;
    }
  }

  void finish_interior(size_t index) {
    Record& record = records_[index];
    if (record.pending.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    if (record.waiter != kNobody) queue_.push(static_cast<size_t>(record.waiter));
  }

  FileWriter& writer_;
  const std::span<const RecordSource> sources_;
  std::vector<Record> records_;
  std::vector<Segment> segments_;
  Segment segment_;
  uint64_t end_ = 0;
  WorkQueue<size_t> queue_;
};

FileWriter::FileWriter(const std::string& path, uint64_t expected_bytes, const io::EngineOptions& options,
                       bool checksums)
    : options_(usable_for_writing(options)),
      checksums_(checksums),
      file_(io::File::create(path, options.widest)),
      control_(path, options.bytes_per_second) {
  try {
    file_->preallocate(expected_bytes);
  } catch (...) {
    system::unlink(path.c_str());
    throw;
  }
}

FileWriter::~FileWriter() {
  if (!finished_) system::unlink(file_->path().c_str());
}

uint64_t FileWriter::space_for(std::span<const int64_t> body_bytes) {
  constexpr uint64_t kFraming = 2 << 10;  // prologue, epilogue and row in the checksum table
  uint64_t total = 4 * kBlock;
  for (const int64_t bytes : body_bytes) {
    const auto body = static_cast<uint64_t>(bytes);
    total += body + body / 1024 + kFraming + (body >= io::kLargeBody ? 3 * kBlock : kRecordAlignment);
  }
  return total;
}

std::vector<PlacedRecord> FileWriter::write(std::span<const RecordSource> records) {
  Group group(*this, records);
  group.run();
  cursor_ = group.end();
  return group.results();
}

uint64_t FileWriter::finish(bool sync) {
  control_.check();
  if (checksums_) {
    const std::string table = table_.serialize(cursor_);
    // Direct like all the rest, so that no page of the file is left in the cache: whole blocks, then the true length.
    Arena& arena = shared_arena(options_.slot_bytes, options_.arena_bytes);
    const Slot slot = arena.acquire();
    for (uint64_t done = 0; done < table.size();) {
      const uint64_t bytes = std::min<uint64_t>(arena.slot_bytes(), table.size() - done);
      const uint64_t padded = align_up(bytes, kBlock);
      std::memcpy(slot.data(), table.data() + done, bytes);
      std::memset(slot.data() + bytes, 0, padded - bytes);
      io::Transfer transfer;
      transfer.call = Call::write;
      transfer.file = file_.get();
      transfer.offset = cursor_ + done;
      transfer.data = slot.data();
      transfer.size = transfer.needed = padded;
      io::perform(transfer);
      done += bytes;
    }
    cursor_ += table.size();
  }
  return seal(cursor_, sync);
}

bool FileWriter::can_send(const std::byte* data) const {
  return file_->access() != io::Access::direct || reinterpret_cast<uintptr_t>(data) % file_->memory_alignment() == 0;
}

uint64_t FileWriter::seal(uint64_t length, bool sync) {
  file_->truncate(length);
  if (sync) file_->sync();
  control_.check();  // syncing may have taken long
  finished_ = true;
  return length;
}

}  // namespace vescale_ckpt::write
