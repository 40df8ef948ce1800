#include "read/reader.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <numeric>
#include <utility>

#include "base/crc32.h"
#include "base/error.h"
#include "format/checksum_table.h"

namespace vescale_ckpt::read {
namespace {

// Smaller tensors are read with their neighbours through a slot.
constexpr uint64_t kInPlaceBytes = 1 << 20;
// Unwanted bytes up to here are cheaper to read than to skip.
constexpr uint64_t kGap = 128 << 10;
// Files held open at a time: a checkpoint of many ranks has more than a process may open.
constexpr unsigned kOpenFiles = 128;
// From the page cache: pieces small enough that their checksum finds them in the processor's cache.
constexpr uint64_t kCachedPiece = 1 << 20;

struct DataFile {
  std::shared_ptr<io::File> file;
  bool table_looked_for = false;
  std::optional<format::ChecksumTable> table;

  const format::ChecksumTable* checksum_table() {
    if (!table_looked_for) {
      table_looked_for = true;
      load_table();
    }
    return table ? &*table : nullptr;
  }

 private:
  void load_table() {
    constexpr uint64_t kFooter = format::ChecksumTable::kFooterBytes;
    if (file->size() < kFooter) return;
    std::byte last[kFooter];
    io::read_exactly(*file, file->size() - kFooter, last);
    const auto footer = format::ChecksumTable::parse_footer(last, file->size());
    if (!footer) return;
    std::vector<std::byte> bytes(footer->table_bytes);
    io::read_exactly(*file, footer->table_offset, bytes);
    table = format::ChecksumTable::parse(bytes, *footer);
  }
};

// One stored record and all items that want something of it.
struct Record {
  std::vector<uint32_t> items;  // rows of the caller's table
  uint32_t file = 0;
  uint64_t offset = 0, length = 0;
  std::shared_ptr<const format::TensorRecord> framing;  // none of a bare record
  uint64_t body_offset = 0, body_bytes = 0;             // in the file
  enum class Check {
    frame,   // whole: prologue, bytes and epilogue must fit each other
    crc,     // whole, laid out in another way or bare: bytes against `crc`
    blocks,  // parts: each block against `blocks`
    none,
  } check = Check::frame;
  bool check_prologue = false;
  uint32_t crc = 0;                    // as found in the file, for Check::crc
  int64_t expected_crc = kUnknownCrc;  // as the caller knows it
  std::span<const uint32_t> blocks;

  // While reading. Each part writes what is its own; who makes `pending` zero reads all.
  std::atomic<uint64_t> pending{0};
  struct PartSum {
    uint32_t crc;
    uint64_t bytes;
  };
  std::vector<PartSum> sums;                  // of body parts in rising order
  std::vector<std::byte> prologue, epilogue;  // as found
  bool unread = false;
  bool concluded = false;  // nothing more is to be read of it

  uint64_t body_end() const { return body_offset + body_bytes; }
};

// A contiguous file range of one record within one segment.
struct Part {
  uint32_t record;
  uint64_t begin, end;  // in the file
  uint32_t sum;         // index into Record::sums, if it has body bytes
};

struct Segment {
  uint32_t file = 0;
  uint64_t begin = 0, end = 0;  // in the file
  std::vector<Part> parts;
  std::byte* in_place = nullptr;  // where `begin` goes, if straight into a tensor
};

enum class Purpose { deliver, deliver_verified, check };

class ReadJob {
 public:
  ReadJob(std::span<const std::string> paths, const OpenFile& open, std::span<const ReadItem> items,
          std::span<const uint32_t> rows, Purpose purpose, const io::EngineOptions& options, ReadReport& report)
      : paths_(paths),
        open_(open),
        items_(items),
        verify_(purpose != Purpose::deliver),
        check_only_(purpose == Purpose::check),
        options_(options),
        report_(report) {
    group_items(rows);
    for (uint32_t index = 0; index < records_.size(); ++index) {
      try {
        plan_record(index);
      } catch (const Error& error) {
        if (!check_only_) throw;
        add_damage(records_[index], error);
      }
    }
    pack_extents();
  }

  void run() {
    try {
      transfer();
    } catch (const Error& error) {
      throw error.item != Error::kNoItem ? error : with_item(error);
    }
    report_unread();
  }

  // Returns the rows of records that a failed transfer kept from being read, with its error.
  std::pair<std::vector<uint32_t>, std::optional<Error>> check() {
    std::optional<Error> failure;
    try {
      transfer();
    } catch (const Error& error) {
      failure = error;
    }
    report_unread();
    std::vector<uint32_t> left;
    for (const Record& record : records_) {
      if (!record.concluded) left.insert(left.end(), record.items.begin(), record.items.end());
    }
    return {std::move(left), std::move(failure)};
  }

 private:
  void report_unread() {
    for (const Record& record : records_) {
      if (record.unread) report_.unread.insert(report_.unread.end(), record.items.begin(), record.items.end());
    }
  }

  void add_damage(Record& record, const Error& error) {
    const std::lock_guard lock(keep_mutex_);
    record.concluded = true;
    for (const uint32_t item : record.items) report_.damaged.push_back({item, error.offset, error.what()});
  }

  void transfer() {
    queue_.expect(segments_.size());
    for (size_t index = 0; index < segments_.size(); ++index) queue_.push(index);
    io::run_transfers(
        queue_, options_, [this](size_t index) { return segments_[index].in_place == nullptr; },
        [this](size_t index, io::Flight& flight) { prepare(segments_[index], flight); },
        [this](io::Flight& flight) { complete(flight); });
  }

  // A failed transfer knows its file and offset: the item is the one whose record lies there.
  Error with_item(const Error& error) const {
    for (const Record& record : records_) {
      if (paths_[record.file] == error.path && error.offset + kBlock > record.offset &&
          error.offset < record.offset + record.length) {
        return Error(error.kind, error.what(), error.path, error.offset, error.code, record.items[0]);
      }
    }
    return error;
  }

  DataFile& file(uint32_t index, uint32_t row) {
    DataFile& data = files_[index];
    try {
      if (!data.file) data.file = open_(index);
    } catch (const Error& error) {
      throw Error(error.kind, error.what(), error.path, error.offset, error.code, row);
    }
    return data;
  }

  // --- Planning, on the calling thread.

  void group_items(std::span<const uint32_t> rows) {  // in the order of their records
    const auto key = [this](uint32_t row) { return std::tuple(items_[row].file, items_[row].record_offset); };
    for (const uint32_t row : rows) {
      if (items_[row].bare && items_[row].record_length == 0) continue;  // it is where the next one is
      if (records_.empty() || key(row) != key(records_.back().items[0])) records_.emplace_back();
      records_.back().items.push_back(row);
    }
  }

  void plan_record(uint32_t index) {
    Record& record = records_[index];
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
    DataFile& data = file(record.file, row);
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
    choose_extents(index, record, data);
  }

  // Where the bytes are and how they will be checked. False if the record has to be left to the caller.
  bool locate_body(Record& record, DataFile& data, bool whole) {
    if (items_[record.items[0]].bare) {
      locate_bare(record, whole);
      return true;
    }
    record.body_offset = record.offset + record.framing->prologue().size();
    const bool predicted = record.length == record.framing->total_bytes();
    if (!predicted && !locate_by_directory(record, *data.file)) return false;
    if (!predicted) {
      // The checksum was found with the bytes; parts of such records are not verifiable but by reading all.
      record.check = verify_ ? Record::Check::crc : Record::Check::none;
      return true;
    }
    if (!whole) {
      const format::ChecksumTable* table = data.checksum_table();
      const format::ChecksumTable::Row* row = table != nullptr ? table->find(record.offset) : nullptr;
      if (row != nullptr && row->body_offset == record.body_offset && row->body_bytes == record.body_bytes) {
        if (verify_ && record.expected_crc != kUnknownCrc && record.expected_crc != row->crc) throw stranger(record);
        record.check = verify_ ? Record::Check::blocks : Record::Check::none;
        record.blocks = table->blocks(*row);
        record.check_prologue = true;  // equal sizes do not make equal dtypes
        return true;
      }
      if (!verify_) {
        record.check = Record::Check::none;
        record.check_prologue = true;  // equal lengths do not make equal strides
        return true;
      }
    }
    record.check = Record::Check::frame;
    record.check_prologue = true;
    return true;
  }

  void locate_bare(Record& record, bool whole) {
    const ReadItem& item = items_[record.items[0]];
    record.body_offset = record.offset;
    record.blocks = item.blocks;
    record.check = Record::Check::none;
    if (!verify_) return;
    if (!record.blocks.empty()) {
      record.check = whole ? Record::Check::crc : Record::Check::blocks;
      record.crc = static_cast<uint32_t>(item.crc);
      return;
    }
    for (const uint32_t row : record.items) report_.unverified_bytes += items_[row].box.bytes();
  }

  // Records of other torch versions: the same pickle and bytes in another archive layout.
  bool locate_by_directory(Record& record, io::File& file) {
    constexpr uint64_t kTail = 2048;
    std::vector<std::byte> tail(std::min(kTail, record.length));
    io::read_exactly(file, record.offset + record.length - tail.size(), tail);
    const auto directory = format::find_directory(tail, record.length);
    if (!directory || directory->size > (1 << 20)) return false;
    std::vector<std::byte> bytes(directory->size);
    io::read_exactly(file, record.offset + directory->offset, bytes);
    const auto entries = format::parse_directory(bytes, *directory);
    if (!entries) return false;
    const format::ArchiveEntry* body = nullptr;
    bool pickle_matches = false, little = true;
    for (const format::ArchiveEntry& entry : *entries) {
      if (entry.name.ends_with("/data/0")) body = &entry;
      const bool is_pickle = entry.name.ends_with("/data.pkl"), is_order = entry.name.ends_with("/byteorder");
      if (!is_pickle && !is_order) continue;
      if (entry.size > 4096) return false;
      std::vector<std::byte> content(entry.size);
      const uint64_t at = body_position(record, file, *directory, entry);
      if (at == 0) return false;
      io::read_exactly(file, at, content);
      const std::string_view text(reinterpret_cast<const char*>(content.data()), content.size());
      if (is_pickle) pickle_matches = text == record.framing->pickle();
      if (is_order) little = text == "little";
    }
    if (body == nullptr || !pickle_matches || !little || body->size != record.body_bytes) return false;
    record.body_offset = body_position(record, file, *directory, *body);
    record.crc = body->crc;
    return record.body_offset != 0;
  }

  // In the file; 0 if the local header is not where the directory says or the body would leave the archive.
  static uint64_t body_position(const Record& record, io::File& file, const format::Directory& directory,
                                const format::ArchiveEntry& entry) {
    std::byte header[30];
    if (entry.header_offset + sizeof header > record.length) return 0;
    io::read_exactly(file, record.offset + entry.header_offset, header);
    const uint64_t at = format::body_offset(header, entry);
    if (at == 0 || at > directory.offset || entry.size > directory.offset - at) return 0;
    return record.offset + at;
  }

  void choose_extents(uint32_t index, Record& record, DataFile& data) {
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
        // What the boxes need, cells rounded up where they are checked, merged over all items.
        std::vector<std::pair<uint64_t, uint64_t>> wanted;
        const bool cells_only = record.check == Record::Check::blocks;
        for (const uint32_t item : record.items) {
          items_[item].box.ranges(cells_only ? format::kChecksumBlock : kGap, [&](uint64_t from, uint64_t to) {
            from += record.body_offset;
            to += record.body_offset;
            if (cells_only) {
              from = std::max(align_down(from, format::kChecksumBlock), record.body_offset);
              to = std::min(align_up(to, format::kChecksumBlock), record.body_end());
            }
            wanted.emplace_back(from, to);
          });
        }
        std::sort(wanted.begin(), wanted.end());
        for (size_t i = 0; i < wanted.size();) {
          auto [from, to] = wanted[i];
          for (++i; i < wanted.size() && wanted[i].first <= to; ++i) to = std::max(to, wanted[i].second);
          add_range(index, from, to, data, from, to);
        }
        break;
      }
    }
  }

  // Queues the file range [begin, end) of a record; what lies in [inner_begin, inner_end) may go in place.
  void add_range(uint32_t index, uint64_t begin, uint64_t end, DataFile& data, uint64_t inner_begin,
                 uint64_t inner_end) {
    Record& record = records_[index];
    auto [from, to] = in_place_range(record, data, inner_begin, inner_end);
    if (to <= from || to - from < kInPlaceBytes) {
      extents_.push_back({index, begin, end, nullptr});
      return;
    }
    if (from > begin) extents_.push_back({index, begin, from, nullptr});
    const ReadItem& item = items_[record.items[0]];
    const bool cached = data.file->access() == io::Access::buffered;
    const uint64_t piece = cached ? std::min(kCachedPiece, options_.slot_bytes) : options_.slot_bytes;
    for (uint64_t at = from; at < to;) {
      const uint64_t next = std::min(to, align_down(at, piece) + piece);
      extents_.push_back({index, at, next, item.memory + (at - record.body_offset - item.box.begin())});
      at = next;
    }
    if (to < end) extents_.push_back({index, to, end, nullptr});
  }

  // The part of [begin, end) that can be read straight into the target: empty if it is strided, wanted more than once,
  // or not congruent with the file.
  std::pair<uint64_t, uint64_t> in_place_range(const Record& record, DataFile& data, uint64_t begin,
                                               uint64_t end) const {
    const ReadItem& item = items_[record.items[0]];
    if (check_only_ || record.items.size() != 1 || !item.box.dense()) return {0, 0};
    begin = std::max(begin, record.body_offset + item.box.begin());
    end = std::min(end, record.body_offset + item.box.end());
    const bool direct = data.file->access() == io::Access::direct;
    const auto address = reinterpret_cast<uintptr_t>(item.memory) - record.body_offset - item.box.begin();
    if (begin >= end || (direct && address % data.file->memory_alignment() != 0)) return {0, 0};
    // Cells checked one by one must arrive whole; checks of the whole body combine any cut.
    const uint64_t grain = record.check == Record::Check::blocks ? format::kChecksumBlock : direct ? kBlock : 1;
    return {align_up(begin, grain), align_down(end, grain)};
  }

  struct Extent {
    uint32_t record;
    uint64_t begin, end;  // in the file
    std::byte* in_place;  // where it goes, nullptr: through a slot
  };

  // Extents come in file order; neighbours share a slot.
  void pack_extents() {
    std::stable_sort(extents_.begin(), extents_.end(), [this](const Extent& a, const Extent& b) {
      return std::tuple(records_[a.record].file, a.begin) < std::tuple(records_[b.record].file, b.begin);
    });
    Segment packed;
    const auto flush = [&] {
      if (!packed.parts.empty()) segments_.push_back(std::move(packed));
      packed = {};
    };
    for (const Extent& extent : extents_) {
      const uint32_t file = records_[extent.record].file;
      if (extent.in_place != nullptr) {
        segments_.push_back({file, extent.begin, extent.end, {}, extent.in_place});
        segments_.back().parts.push_back(part(extent.record, extent.begin, extent.end));
        continue;
      }
      for (uint64_t at = extent.begin; at < extent.end;) {
        const bool near = !packed.parts.empty() && packed.file == file && at <= packed.end + kGap;
        const uint64_t start = near ? packed.begin : align_down(at, kBlock);
        const uint64_t limit = align_down(start + options_.slot_bytes, kBlock);
        // A record that fits a slot is not cut; one that does not is cut on cells.
        const bool fits = extent.end <= limit;
        const bool would_fit = extent.end - align_down(at, kBlock) <= options_.slot_bytes;
        if (near && !fits && would_fit) {
          flush();
          continue;
        }
        const uint64_t end = fits ? extent.end : align_down(limit, format::kChecksumBlock);
        if (!near || end <= at) {
          flush();
          packed.file = file;
          packed.begin = align_down(at, kBlock);
          if (end <= at) continue;
        }
        packed.parts.push_back(part(extent.record, at, end));
        packed.end = std::max(packed.end, end);  // rows may claim overlapping ranges
        at = end;
      }
    }
    flush();
  }

  Part part(uint32_t index, uint64_t begin, uint64_t end) {
    Record& record = records_[index];
    record.pending.fetch_add(1, std::memory_order_relaxed);
    Part part{index, begin, end, static_cast<uint32_t>(record.sums.size())};
    if (std::max(begin, record.body_offset) < std::min(end, record.body_end())) record.sums.push_back({});
    return part;
  }

  // --- Reading, on the workers.

  void prepare(const Segment& segment, io::Flight& flight) {
    io::File& file = *files_.at(segment.file).file;
    flight.transfer.call = Call::read;
    flight.transfer.file = &file;
    flight.transfer.offset = segment.begin;
    flight.transfer.needed = segment.end - segment.begin;
    flight.transfer.data = segment.in_place != nullptr ? segment.in_place : flight.slot->data();
    // Whole blocks, also across the end of the file.
    flight.transfer.size =
        segment.in_place != nullptr ? flight.transfer.needed : align_up(segment.end, kBlock) - segment.begin;
    flight.item = &segment;
  }

  void complete(io::Flight& flight) {
    const Segment& segment = *static_cast<const Segment*>(flight.item);
    report_.stats.count(flight, segment.end - segment.begin);
    for (const Part& part : segment.parts) {
      const std::byte* data = flight.transfer.data + (part.begin - segment.begin);
      if (!check_only_) {
        take(part, data, segment.in_place == nullptr);
        continue;
      }
      try {
        take(part, data, false);
      } catch (const Error& error) {
        add_damage(records_[part.record], error);
      }
    }
  }

  void take(const Part& part, const std::byte* data, bool scatter) {
    Record& record = records_[part.record];
    const uint64_t body = record.body_offset, body_end = record.body_end();
    const uint64_t from = std::max(part.begin, body), to = std::min(part.end, body_end);
    if (from < to) {
      const std::byte* bytes = data + (from - part.begin);
      if (verify_ && record.check == Record::Check::blocks) {
        check_blocks(record, bytes, from, to);
      } else if (verify_ && record.check != Record::Check::none) {
        record.sums[part.sum] = {crc32(0, bytes, to - from), to - from};
      }
      if (scatter) {
        for (const uint32_t item : record.items) {
          items_[item].box.scatter(bytes, from - body, to - body, items_[item].memory);
        }
      }
    }
    if (part.begin == record.offset && part.end == record.offset + record.length) {  // the usual small record
      conclude(record, {data, body - part.begin}, {data + (body_end - part.begin), part.end - body_end});
      return;
    }
    if (part.begin < body && record.check_prologue) {
      keep(record.prologue, record.framing->prologue().size(), part.begin - record.offset, data,
           std::min(part.end, body) - part.begin);
    }
    if (part.end > body_end && record.check == Record::Check::frame) {
      const uint64_t start = std::max(part.begin, body_end);
      keep(record.epilogue, record.framing->epilogue_bytes(), start - body_end, data + (start - part.begin),
           part.end - start);
    }
    if (record.pending.fetch_sub(1, std::memory_order_acq_rel) == 1) conclude(record, record.prologue, record.epilogue);
  }

  // Framing may arrive in pieces, on several threads.
  void keep(std::vector<std::byte>& store, uint64_t size, uint64_t at, const std::byte* data, uint64_t bytes) {
    const std::lock_guard lock(keep_mutex_);
    store.resize(size);
    std::memcpy(store.data() + at, data, bytes);
  }

  void check_blocks(const Record& record, const std::byte* bytes, uint64_t from, uint64_t to) const {
    for (uint64_t at = from; at < to;) {
      const uint64_t next = std::min(to, align_down(at, format::kChecksumBlock) + format::kChecksumBlock);
      const uint64_t cell = at / format::kChecksumBlock - record.body_offset / format::kChecksumBlock;
      if (crc32(0, bytes + (at - from), next - at) != record.blocks[cell]) throw mismatch(record, at, next - at);
      at = next;
    }
  }

  Error mismatch(const Record& record, uint64_t offset, uint64_t bytes) const {
    const std::string& path = paths_[record.file];
    return Error::corrupt("checksum mismatch in " + path + " within " + std::to_string(bytes) + " bytes at offset " +
                              std::to_string(offset),
                          path, offset, record.items[0]);
  }

  // All parts are there.
  void conclude(Record& record, std::span<const std::byte> prologue, std::span<const std::byte> epilogue) {
    record.concluded = true;
    if (record.check_prologue &&
        std::memcmp(prologue.data(), record.framing->prologue().data(), prologue.size()) != 0) {
      record.unread = true;  // transposed, conjugated, written by somebody else: or damaged, which the caller finds out
      return;
    }
    if (!verify_ || record.check == Record::Check::none || record.check == Record::Check::blocks) return;
    uint32_t crc = 0;
    for (size_t i = 0; i < record.sums.size(); ++i) {
      crc = i == 0 ? record.sums[0].crc : crc32_combine(crc, record.sums[i].crc, record.sums[i].bytes);
    }
    uint32_t claimed = record.crc;
    if (record.check == Record::Check::frame) {
      claimed = record.framing->claimed_crc(epilogue);
      if (!record.framing->epilogue_matches(claimed, epilogue)) {
        record.unread = true;
        return;
      }
    }
    const bool bare = record.framing == nullptr;  // of which zero is a checksum like any other
    if (crc != claimed && (claimed != 0 || bare)) throw locate_damage(record);
    if (bare) return;
    if (record.expected_crc != kUnknownCrc) {
      if (crc != record.expected_crc) throw stranger(record);
    } else if (crc != claimed) {  // written without checksums: torch's set_crc32_options(False), or ours
      const std::lock_guard lock(keep_mutex_);
      report_.unverified_bytes += record.body_bytes;
    }
  }

  // The record is sound, but not the one that was saved: a file of another save under this name.
  Error stranger(const Record& record) const {
    const std::string& path = paths_[record.file];
    return Error::corrupt("the record at offset " + std::to_string(record.offset) + " of " + path +
                              " is not the one that was saved: the file was replaced or is from another save",
                          path, record.offset, record.items[0]);
  }

  static std::span<const uint32_t> known_blocks(const Record& record, DataFile& data) {
    if (record.framing == nullptr) return record.blocks;
    const format::ChecksumTable* table = data.checksum_table();
    const format::ChecksumTable::Row* row = table != nullptr ? table->find(record.offset) : nullptr;
    if (row == nullptr || row->body_offset != record.body_offset || row->body_bytes != record.body_bytes) return {};
    return table->blocks(*row);
  }

  // Reads the record once more to name the damaged block, where the file has a table.
  Error locate_damage(const Record& record) {
    const std::lock_guard lock(keep_mutex_);
    DataFile& data = files_.at(record.file);
    if (const auto blocks = known_blocks(record, data); !blocks.empty()) {
      std::vector<std::byte> bytes(format::kChecksumBlock);
      for (uint64_t at = record.body_offset, cell = 0; at < record.body_end(); ++cell) {
        const uint64_t next =
            std::min(record.body_end(), align_down(at, format::kChecksumBlock) + format::kChecksumBlock);
        io::read_exactly(*data.file, at, std::span(bytes).first(next - at));
        if (crc32(0, bytes.data(), next - at) != blocks[cell]) return mismatch(record, at, next - at);
        at = next;
      }
    }
    return mismatch(record, record.body_offset, record.body_bytes);
  }

  const std::span<const std::string> paths_;
  const OpenFile& open_;
  const std::span<const ReadItem> items_;
  const bool verify_;
  const bool check_only_;
  const io::EngineOptions& options_;
  std::map<uint32_t, DataFile> files_;
  format::RecordCache framings_;
  std::deque<Record> records_;  // addresses stay: they hold atomics
  std::vector<Extent> extents_;
  std::vector<Segment> segments_;
  WorkQueue<size_t> queue_;
  std::mutex keep_mutex_;  // guards what several workers may touch in conclude(), keep() and add_damage()
  ReadReport& report_;
};

// Calls `work` with rows in file order, of as many files at a time as may be open.
template <typename Work>
void for_each_batch(std::span<const ReadItem> items, const Work& work) {
  std::vector<uint32_t> order(items.size());
  std::iota(order.begin(), order.end(), 0);
  const auto key = [&](uint32_t row) { return std::tuple(items[row].file, items[row].record_offset); };
  std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return key(a) < key(b); });
  for (size_t begin = 0; begin < order.size();) {
    size_t end = begin;
    for (unsigned files = 0; end < order.size(); ++end) {
      files += end == begin || items[order[end]].file != items[order[end - 1]].file;
      if (files > kOpenFiles) break;
    }
    work(std::span(order).subspan(begin, end - begin));
    begin = end;
  }
}

// One transfer carries many small records: which of them the disk cannot give is found by halving. What was read before
// the failure is not read again.
void check_rows(std::span<const std::string> paths, const OpenFile& open, std::span<const ReadItem> items,
                std::span<const uint32_t> rows, const io::EngineOptions& options, ReadReport& report) {
  const auto [left, failure] = ReadJob(paths, open, items, rows, Purpose::check, options, report).check();
  if (!failure) return;
  if (left.size() <= 1) {
    for (const uint32_t item : left) report.damaged.push_back({item, failure->offset, failure->what()});
    return;
  }
  const std::span<const uint32_t> all(left);
  check_rows(paths, open, items, all.first(all.size() / 2), options, report);
  check_rows(paths, open, items, all.subspan(all.size() / 2), options, report);
}

OpenFile by_path(std::span<const std::string> paths, const io::EngineOptions& options) {
  return [paths, &options](uint32_t file) { return io::File::open(paths[file], options.widest, options.read_cached); };
}

}  // namespace

std::unique_ptr<ReadReport> read_tensors(std::span<const std::string> paths, std::span<const ReadItem> items,
                                         bool verify, const io::EngineOptions& options) {
  return read_tensors(paths, by_path(paths, options), items, verify, options);
}

std::unique_ptr<ReadReport> read_tensors(std::span<const std::string> paths, const OpenFile& open,
                                         std::span<const ReadItem> items, bool verify,
                                         const io::EngineOptions& options) {
  auto report = std::make_unique<ReadReport>();
  const Purpose purpose = verify ? Purpose::deliver_verified : Purpose::deliver;
  for_each_batch(items, [&](std::span<const uint32_t> rows) {
    ReadJob(paths, open, items, rows, purpose, options, *report).run();
  });
  std::sort(report->unread.begin(), report->unread.end());
  return report;
}

std::unique_ptr<ReadReport> check_tensors(std::span<const std::string> paths, std::span<const ReadItem> items,
                                          const io::EngineOptions& options) {
  return check_tensors(paths, by_path(paths, options), items, options);
}

std::unique_ptr<ReadReport> check_tensors(std::span<const std::string> paths, const OpenFile& open,
                                          std::span<const ReadItem> items, const io::EngineOptions& options) {
  auto report = std::make_unique<ReadReport>();
  for_each_batch(items,
                 [&](std::span<const uint32_t> rows) { check_rows(paths, open, items, rows, options, *report); });
  std::sort(report->unread.begin(), report->unread.end());
  std::stable_sort(report->damaged.begin(), report->damaged.end(),
                   [](const DamagedItem& a, const DamagedItem& b) { return a.item < b.item; });
  return report;
}

void read_ranges(std::span<const std::string> paths, std::span<const ByteRange> ranges,
                 std::span<std::byte* const> targets, const io::EngineOptions& options) {
  std::vector<uint32_t> order(ranges.size());
  std::iota(order.begin(), order.end(), 0);
  const auto key = [&](uint32_t row) { return std::tuple(ranges[row].file, ranges[row].offset); };
  std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return key(a) < key(b); });

  // Objects are small and lie together: runs of neighbours in one blocking read each.
  std::unique_ptr<io::File> file;
  uint32_t opened = 0;
  std::vector<std::byte> buffer;
  for (size_t first = 0; first < order.size();) {
    const ByteRange& head = ranges[order[first]];
    try {
      if (!file || opened != head.file) file = io::File::open(paths[head.file], io::Access::buffered);
      opened = head.file;
      uint64_t end = head.offset;
      size_t last = first;
      for (; last < order.size(); ++last) {
        const ByteRange& range = ranges[order[last]];
        if (range.file != head.file || range.offset > end + kGap) break;
        if (last != first && range.offset + range.length - head.offset > options.slot_bytes) break;
        if (range.offset > file->size() || range.length > file->size() - range.offset) {
          throw Error::corrupt("file " + file->path() + " is truncated: it has " + std::to_string(file->size()) +
                                   " bytes, the object at offset " + std::to_string(range.offset) + " needs " +
                                   std::to_string(range.length),
                               file->path(), range.offset, order[last]);
        }
        end = std::max(end, range.offset + range.length);
      }
      if (last == first + 1) {
        io::read_exactly(*file, head.offset, {targets[order[first]], head.length});
      } else {
        buffer.resize(end - head.offset);
        io::read_exactly(*file, head.offset, buffer);
        for (size_t i = first; i < last; ++i) {
          const ByteRange& range = ranges[order[i]];
          if (range.length != 0) {
            std::memcpy(targets[order[i]], buffer.data() + (range.offset - head.offset), range.length);
          }
        }
      }
      first = last;
    } catch (const Error& error) {
      if (error.item != Error::kNoItem) throw;
      throw Error(error.kind, error.what(), error.path, error.offset, error.code, order[first]);
    }
  }
}

}  // namespace vescale_ckpt::read
