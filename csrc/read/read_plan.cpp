#include "read/read_plan.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "io/transfer.h"
#include "read/archive_file.h"

namespace vescale_ckpt::read {
namespace {

// Smaller tensors are read through a slot together with their neighbours.
constexpr uint64_t kInPlaceBytes = 1 << 20;
// Pieces from the page cache are small enough to be in the processor's cache when they are checksummed, or copied out
// of a slot.
constexpr uint64_t kCachedPiece = 512 << 10;
static_assert(kCachedPiece >= 2 * format::kChecksumBlock);  // a piece with any start contains a whole cell

}  // namespace

const format::ChecksumTable::Row* DataFile::row_of(const Record& record) {
  if (!table_looked_for_) {
    table_looked_for_ = true;
    uint64_t at = 0;
    table_ = load_checksum_table(*file, at);
  }
  const format::ChecksumTable::Row* row = table_ ? table_->find(record.offset) : nullptr;
  const bool fits = row != nullptr && row->body_offset == record.body_offset && row->body_bytes == record.body_bytes;
  return fits ? row : nullptr;
}

std::optional<format::ChecksumTable> load_checksum_table(io::File& file, uint64_t& at) {
  std::vector<std::byte> bytes(format::ChecksumTable::kFooterBytes);
  at = 0;
  if (file.size() < bytes.size()) return std::nullopt;
  at = file.size() - bytes.size();
  io::read_exactly(file, at, bytes);
  const auto footer = format::ChecksumTable::parse_footer(bytes, file.size());
  if (!footer) return std::nullopt;
  at = footer->table_offset;
  bytes.resize(footer->table_bytes);
  io::read_exactly(file, at, bytes);
  return format::ChecksumTable::parse(bytes, *footer);
}

void note_damage(Record& record, const Error& error, ReadReport& report) {
  record.concluded = true;
  for (const uint32_t item : record.items) report.damaged.push_back({item, error.offset, error.what(), error.code});
}

Error replaced_record(const Record& record, const std::string& path) {
  return Error::corrupt("the record at offset " + std::to_string(record.offset) + " of " + path +
                            " is not the one that was saved: the file was replaced or is from another save",
                        path, record.offset, record.items[0]);
}

ReadPlan::ReadPlan(const OpenFile& open, std::span<const ReadItem> items, std::span<const uint32_t> rows,
                   Purpose purpose, const io::EngineOptions& options, ReadReport& report)
    : open_(open),
      items_(items),
      verify_(purpose != Purpose::deliver),
      check_only_(purpose == Purpose::check),
      to_devices_(std::ranges::any_of(rows, [&](uint32_t row) { return items[row].device >= 0; })),
      options_(options),
      report_(report) {
  group_items(rows);
  for (uint32_t index = 0; index < records.size(); ++index) {
    try {
      plan_record(index);
    } catch (const Error& error) {
      if (!check_only_) throw;
      note_damage(records[index], error, report_);
    }
  }
  pack_ranges();
}

DataFile& ReadPlan::opened(uint32_t index, uint32_t row) {
  DataFile& data = files[index];
  try {
    if (!data.file) data.file = open_(index);
  } catch (const Error& error) {
    throw error.of_item(row);
  }
  return data;
}

void ReadPlan::group_items(std::span<const uint32_t> rows) {  // rows are in the order of their records
  const auto key = [this](uint32_t row) { return std::tuple(items_[row].file, items_[row].record_offset); };
  for (const uint32_t row : rows) {
    if (items_[row].bare && items_[row].record_length == 0) continue;  // the next record starts at the same place
    if (records.empty() || key(row) != key(records.back().items[0])) records.emplace_back();
    records.back().items.push_back(row);
  }
}

void ReadPlan::plan_record(uint32_t index) {
  Record& record = records[index];
  const uint32_t row = record.items[0];
  const ReadItem& first = items_[row];
  record.file = first.file;
  record.offset = first.record_offset;
  record.length = first.record_length;
  record.expected_crc = first.crc;
  try {
    if (!first.bare) record.framing = framings_.get(first.dtype, first.chunk_sizes);
  } catch (const Error& error) {
    throw Error::invalid(error.what(), row);
  }
  record.body_bytes = first.bare ? record.length : record.framing->body_bytes();
  bool whole = false;
  for (const uint32_t item : record.items) {
    if (items_[item].record_length != record.length || items_[item].dtype != first.dtype ||
        items_[item].chunk_sizes != first.chunk_sizes) {
      throw Error::invalid("two rows disagree about the record at offset " + std::to_string(record.offset), item);
    }
    whole = whole || items_[item].box.whole();
    report_.needed_bytes += items_[item].box.bytes();
  }
  DataFile& data = opened(record.file, row);
  if (record.offset > data.file->size() || record.length > data.file->size() - record.offset) {
    throw Error::corrupt("file " + data.file->path() + " is truncated: it has " + std::to_string(data.file->size()) +
                             " bytes, the record at offset " + std::to_string(record.offset) + " needs " +
                             std::to_string(record.length),
                         data.file->path(), record.offset, row);
  }
  if (!locate_body(record, data, whole)) {
    record.unread = record.concluded = true;
    return;
  }
  if (record.body_bytes == 0 && record.check != Record::Check::frame) {
    record.concluded = true;
    return;
  }
  choose_ranges(index, record, data);
}

// Finds the body, and how it will be checked. Returns false if the record is left to the caller.
bool ReadPlan::locate_body(Record& record, DataFile& data, bool whole) {
  if (items_[record.items[0]].bare) {
    locate_bare(record, whole);
    return true;
  }
  record.body_offset = record.offset + record.framing->prologue().size();
  if (record.length != record.framing->total_bytes()) {
    const auto body = find_tensor(*data.file, record.offset, record.length, *record.framing);
    if (!body) return false;
    record.body_offset = body->offset;
    record.crc = body->crc;
    // The checksum was found with the bytes. Parts of such records can only be verified by reading the whole.
    record.check = verify_ ? Record::Check::crc : Record::Check::none;
    return true;
  }
  if (!whole) {
    if (const format::ChecksumTable::Row* row = data.row_of(record)) {
      if (verify_ && record.expected_crc != kUnknownCrc && record.expected_crc != row->crc) {
        throw replaced_record(record, data.file->path());
      }
      record.check = verify_ ? Record::Check::blocks : Record::Check::none;
      record.blocks = data.blocks(*row);
      record.check_prologue = true;  // dtypes may differ although sizes are equal
      return true;
    }
    if (!verify_) {
      record.check = Record::Check::none;
      record.check_prologue = true;  // strides may differ although lengths are equal
      return true;
    }
  }
  record.check = Record::Check::frame;
  record.check_prologue = true;
  return true;
}

void ReadPlan::locate_bare(Record& record, bool whole) {
  record.body_offset = record.offset;
  record.blocks = items_[record.items[0]].blocks;
  record.check = Record::Check::none;
  if (!verify_) return;
  if (!record.blocks.empty()) {
    record.check = whole ? Record::Check::crc : Record::Check::blocks;
    if (whole) record.crc = format::joined_crc(record.body_offset, record.body_end(), record.blocks);
    return;
  }
  for (const uint32_t row : record.items) report_.unverified_bytes += items_[row].box.bytes();
}

void ReadPlan::choose_ranges(uint32_t index, Record& record, DataFile& data) {
  const uint64_t begin = record.offset, end = record.offset + record.length;
  switch (record.check) {
    case Record::Check::frame:
      add_range(index, begin, end, data, record.body_offset, record.body_end());
      break;
    case Record::Check::crc:
      add_range(index, record.body_offset, record.body_end(), data, record.body_offset, record.body_end());
      break;
    case Record::Check::blocks:
    case Record::Check::none: {
      if (record.check_prologue) add_range(index, begin, record.body_offset, data, 0, 0);
      // Collects the ranges that the boxes need, merged over all items. Ranges with checks grow to whole cells.
      std::vector<std::pair<uint64_t, uint64_t>> ranges;
      const bool cells_only = record.check == Record::Check::blocks;
      for (const uint32_t item : record.items) {
        items_[item].box.ranges(cells_only ? format::kChecksumBlock : options_.read_gap,
                                [&](uint64_t from, uint64_t to) {
                                  from += record.body_offset;
                                  to += record.body_offset;
                                  if (cells_only) {
                                    from = std::max(align_down(from, format::kChecksumBlock), record.body_offset);
                                    to = std::min(align_up(to, format::kChecksumBlock), record.body_end());
                                  }
                                  ranges.emplace_back(from, to);
                                });
      }
      std::sort(ranges.begin(), ranges.end());
      for (size_t i = 0; i < ranges.size();) {
        auto [from, to] = ranges[i];
        for (++i; i < ranges.size() && ranges[i].first <= to; ++i) to = std::max(to, ranges[i].second);
        add_range(index, from, to, data, from, to);
      }
      break;
    }
  }
}

// Queues the file range [begin, end) of a record. The part in [inner_begin, inner_end) may be read in place.
void ReadPlan::add_range(uint32_t index, uint64_t begin, uint64_t end, DataFile& data, uint64_t inner_begin,
                         uint64_t inner_end) {
  Record& record = records[index];
  const ReadItem& item = items_[record.items[0]];
  const auto [from, to] = may_go_in_place(record, data) ? in_place_range(record, data, inner_begin, inner_end)
                                                        : std::pair<uint64_t, uint64_t>();
  if (to <= from || to - from < kInPlaceBytes) {
    needed_.push_back({index, begin, end, nullptr});
    return;
  }
  if (from > begin) needed_.push_back({index, begin, from, nullptr});
  for (uint64_t at = from; at < to;) {
    const uint64_t next = std::min(to, end_of_piece(at, data));
    needed_.push_back({index, at, next, item.memory + (at - record.body_offset - item.box.begin())});
    at = next;
  }
  if (to < end) needed_.push_back({index, to, end, nullptr});
}

// Returns the largest size of a transfer. Data for accelerators is copied there in whole slots.
uint64_t ReadPlan::piece_bytes(const DataFile& data) const {
  const bool cached = data.file->access() == io::Access::buffered && data.file->remote() == nullptr;
  return cached && !to_devices_ ? std::min(kCachedPiece, options_.slot_bytes) : options_.slot_bytes;
}

uint64_t ReadPlan::end_of_piece(uint64_t at, const DataFile& data) const {
  const uint64_t piece = piece_bytes(data);
  return align_down(at, piece) + piece;
}

// Whether a record may be read in place: its target is contiguous, it has one item, and both alignments agree.
bool ReadPlan::may_go_in_place(const Record& record, const DataFile& data) const {
  const ReadItem& item = items_[record.items[0]];
  if (check_only_ || record.items.size() != 1 || !item.box.dense() || item.device >= 0) return false;
  if (data.file->remote() != nullptr) return false;  // one request reads several tensors and the gaps between them
  const auto address = reinterpret_cast<uintptr_t>(item.memory) - record.body_offset - item.box.begin();
  return data.file->access() != io::Access::direct || address % data.file->memory_alignment() == 0;
}

// Returns the part of [begin, end) that can be read into the target of a record that may be read in place.
std::pair<uint64_t, uint64_t> ReadPlan::in_place_range(const Record& record, const DataFile& data, uint64_t begin,
                                                       uint64_t end) const {
  const io::Box& box = items_[record.items[0]].box;
  begin = std::max(begin, record.body_offset + box.begin());
  end = std::min(end, record.body_offset + box.end());
  if (begin >= end) return {0, 0};
  // Cells that are checked one by one must arrive whole. A check of the whole body combines any parts.
  const uint64_t grain = record.check == Record::Check::blocks ? format::kChecksumBlock : data.block();
  return {align_up(begin, grain), align_down(end, grain)};
}

// Packs neighbours into one slot.
void ReadPlan::pack_ranges() {
  std::stable_sort(needed_.begin(), needed_.end(), [this](const NeededRange& a, const NeededRange& b) {
    return std::tuple(records[a.record].file, a.begin) < std::tuple(records[b.record].file, b.begin);
  });
  FileRange packed;
  const auto flush = [&] {
    if (!packed.parts.empty()) file_ranges.push_back(std::move(packed));
    packed = {};
  };
  for (const NeededRange& range : needed_) {
    const uint32_t file = records[range.record].file;
    if (range.in_place != nullptr) {
      const RecordRange all = part(range.record, range.begin, range.end);
      file_ranges.push_back({file, range.begin, range.end, {all}, range.in_place});
      continue;
    }
    for (uint64_t at = range.begin; at < range.end;) {
      const uint64_t most = piece_bytes(files.at(file));
      const bool near = !packed.parts.empty() && packed.file == file && at <= packed.end + options_.read_gap;
      const uint64_t start = near ? packed.begin : align_down(at, kBlock);
      const uint64_t limit = align_down(start + most, kBlock);
      // A record that fits into a transfer is not cut, unless the cut makes a request smaller. A larger record is cut
      // on cells.
      const bool fits = range.end <= limit, is_remote = files.at(file).file->remote() != nullptr;
      const bool would_fit = !is_remote && range.end - align_down(at, kBlock) <= most;
      if (near && !fits && would_fit) {
        flush();
        continue;
      }
      const uint64_t end = fits ? range.end : align_down(limit, format::kChecksumBlock);
      if (!near || end <= at) {
        flush();
        packed.file = file;
        packed.begin = align_down(at, kBlock);
        if (end <= at) continue;
      }
      packed.parts.push_back(part(range.record, at, end));
      packed.end = std::max(packed.end, end);  // ranges of rows may overlap
      at = end;
    }
  }
  flush();
}

RecordRange ReadPlan::part(uint32_t index, uint64_t begin, uint64_t end) {
  Record& record = records[index];
  record.pending.fetch_add(1, std::memory_order_relaxed);
  RecordRange part{index, begin, end, static_cast<uint32_t>(record.sums.size())};
  if (std::max(begin, record.body_offset) < std::min(end, record.body_end())) record.sums.push_back({});
  return part;
}

}  // namespace vescale_ckpt::read
