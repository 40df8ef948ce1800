#include "read/reader.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <numeric>
#include <utility>

#include "base/crc32.h"
#include "base/error.h"
#include "format/checksum_table.h"
#include "io/transfer.h"
#include "read/read_plan.h"

namespace vescale_ckpt::read {
namespace {

// So many files are open at a time: a checkpoint of many ranks has more files than a process may open.
constexpr unsigned kOpenFiles = 128;

class ReadJob {
 public:
  ReadJob(std::span<const std::string> paths, const OpenFile& open, std::span<const ReadItem> items,
          std::span<const uint32_t> rows, Purpose purpose, const io::EngineOptions& options, ReadReport& report,
          DeviceSink* sink = nullptr)
      : paths_(paths),
        items_(items),
        verify_(purpose != Purpose::deliver),
        check_only_(purpose == Purpose::check),
        options_(options),
        report_(report),
        sink_(sink),
        plan_(open, items, rows, purpose, options, report) {}

  void run() {
    try {
      transfer();
    } catch (const Error& error) {
      throw error.item != Error::kNoItem ? error : with_item(error);
    }
    report_unread();
  }

  // Returns the rows of records that were not read because of a failed transfer, and its error.
  std::pair<std::vector<uint32_t>, std::optional<Error>> check() {
    std::optional<Error> failure;
    try {
      transfer();
    } catch (const Error& error) {
      failure = error;
    }
    report_unread();
    std::vector<uint32_t> left;
    for (const Record& record : plan_.records) {
      if (!record.concluded) left.insert(left.end(), record.items.begin(), record.items.end());
    }
    return {std::move(left), std::move(failure)};
  }

 private:
  void report_unread() {
    for (const Record& record : plan_.records) {
      if (record.unread) report_.unread.insert(report_.unread.end(), record.items.begin(), record.items.end());
    }
  }

  void add_damage(Record& record, const Error& error) {
    const std::lock_guard lock(keep_mutex_);
    note_damage(record, error, report_);
  }

  void transfer() {
    queue_.expect(plan_.file_ranges.size());
    for (size_t index = 0; index < plan_.file_ranges.size(); ++index) queue_.push(index);
    io::EngineOptions options = options_;
    options.threads = workers();
    io::run_transfers(
        queue_, options,
        [this](size_t index) {
          const FileRange& range = plan_.file_ranges[index];
          return range.in_place == nullptr && plan_.files.at(range.file).file->remote() == nullptr;
        },
        [this](size_t index, io::Flight& flight) { prepare(plan_.file_ranges[index], flight); },
        [this](io::Flight& flight) { complete(flight); });
  }

  // Takes twice the usual number of threads if most transfers are short: a disk needs many bytes in flight.
  unsigned workers() const {
    uint64_t bytes = 0, count = 0;
    for (const FileRange& range : plan_.file_ranges) {
      if (plan_.files.at(range.file).file->access() != io::Access::direct) continue;
      bytes += range.end - range.begin;
      ++count;
    }
    const bool in_short_transfers = count > options_.threads && bytes / count < options_.slot_bytes / 2;
    return options_.threads > 1 && in_short_transfers ? 2 * options_.threads : options_.threads;
  }

  // The file and offset of a failed transfer give the item whose record lies there.
  Error with_item(const Error& error) const {
    for (const Record& record : plan_.records) {
      if (paths_[record.file] == error.path && error.offset + kBlock > record.offset &&
          error.offset < record.offset + record.length) {
        return error.of_item(record.items[0]);
      }
    }
    return error;
  }

  // --- Reads on the workers.

  void prepare(const FileRange& range, io::Flight& flight) {
    io::File& file = *plan_.files.at(range.file).file;
    flight.transfer.call = Call::read;
    flight.transfer.file = &file;
    flight.transfer.offset = range.begin;
    flight.transfer.needed = range.end - range.begin;
    // The bytes of a remote file are used in the store client's memory.
    flight.transfer.data = range.in_place != nullptr ? range.in_place : flight.slot ? flight.slot->data() : nullptr;
    // Reads whole blocks, also across the end of the file.
    flight.transfer.size =
        range.in_place != nullptr ? flight.transfer.needed : align_up(range.end, kBlock) - range.begin;
    flight.item = &range;
    if (sink_ != nullptr && flight.slot) sink_->prepare({flight.slot->data(), options_.slot_bytes});
  }

  void complete(io::Flight& flight) {
    const FileRange& range = *static_cast<const FileRange*>(flight.item);
    report_.stats.count(flight, range.end - range.begin);
    const auto batch = sink_ != nullptr && flight.slot ? sink_->begin() : nullptr;
    for (const RecordRange& part : range.parts) {
      const std::byte* data = flight.transfer.data + (part.begin - range.begin);
      if (!check_only_) {
        take(part, data, range.in_place == nullptr, batch.get());
        continue;
      }
      try {
        take(part, data, false, nullptr);
      } catch (const Error& error) {
        add_damage(plan_.records[part.record], error);
      }
    }
    if (batch == nullptr) return;
    try {
      batch->send(std::move(*flight.slot));
    } catch (const Error& error) {
      throw error.of_item(plan_.records[range.parts[0].record].items[0]);
    }
  }

  void take(const RecordRange& part, const std::byte* data, bool scatter, DeviceSink::Batch* batch) {
    Record& record = plan_.records[part.record];
    const uint64_t body = record.body_offset, body_end = record.body_end();
    const uint64_t from = std::max(part.begin, body), to = std::min(part.end, body_end);
    if (from < to) {
      const std::byte* bytes = data + (from - part.begin);
      const bool sums = verify_ && record.check != Record::Check::blocks && record.check != Record::Check::none;
      std::byte* const copy_to = scatter ? dense_target(record, from - body, to - body) : nullptr;
      if (sums && copy_to != nullptr) {
        record.sums[part.sum] = {copy_crc32(copy_to, bytes, to - from, 0), to - from};
        scatter = false;
      } else if (sums) {
        record.sums[part.sum] = {crc32(0, bytes, to - from), to - from};
      } else if (verify_ && record.check == Record::Check::blocks) {
        check_blocks(record, bytes, from, to);
      }
      if (scatter) {
        for (const uint32_t item : record.items) {
          if (items_[item].device >= 0) {
            batch->add(items_[item], bytes, from - body, to - body);
          } else {
            items_[item].box.scatter(bytes, from - body, to - body, items_[item].memory);
          }
        }
      }
    }
    if (part.begin == record.offset &&
        part.end == record.offset + record.length) {  // most small records are in one part
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

  // Returns the target of the body range [begin, end) if it is one contiguous place in host memory; otherwise null.
  std::byte* dense_target(const Record& record, uint64_t begin, uint64_t end) const {
    const ReadItem& item = items_[record.items[0]];
    const bool fits = record.items.size() == 1 && item.device < 0 && item.box.dense() && begin >= item.box.begin() &&
                      end <= item.box.end();
    return fits ? item.memory + (begin - item.box.begin()) : nullptr;
  }

  // Keeps framing, which may arrive in several parts on several threads.
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

  // Checks a record whose parts have all arrived.
  void conclude(Record& record, std::span<const std::byte> prologue, std::span<const std::byte> epilogue) {
    record.concluded = true;
    if (record.check_prologue &&
        std::memcmp(prologue.data(), record.framing->prologue().data(), prologue.size()) != 0) {
      record.unread = true;  // it may be transposed, conjugated, of another writer, or damaged: the caller finds out
      return;
    }
    if (!verify_ || record.check == Record::Check::none || record.check == Record::Check::blocks) return;
    uint32_t crc = 0;
    for (const Record::PartSum& sum : record.sums) crc = crc32_combine(crc, sum.crc, sum.bytes);
    uint32_t claimed = record.crc;
    if (record.check == Record::Check::frame) {
      claimed = record.framing->claimed_crc(epilogue);
      if (!record.framing->epilogue_matches(claimed, epilogue)) {
        record.unread = true;
        return;
      }
    }
    const bool bare = record.framing == nullptr;  // a bare record may have the checksum 0
    if (crc != claimed && (claimed != 0 || bare)) throw locate_damage(record);
    if (bare) return;
    if (record.expected_crc != kUnknownCrc) {
      if (crc != record.expected_crc) throw replaced_record(record, paths_[record.file]);
    } else if (crc != claimed) {  // the record was written without checksums
      const std::lock_guard lock(keep_mutex_);
      report_.unverified_bytes += record.body_bytes;
    }
  }

  static std::span<const uint32_t> known_blocks(const Record& record, DataFile& data) {
    if (record.framing == nullptr) return record.blocks;
    const format::ChecksumTable::Row* row = data.row_of(record);
    return row == nullptr ? std::span<const uint32_t>() : data.blocks(*row);
  }

  // Reads the record again to name the damaged block, if the file has a table.
  Error locate_damage(const Record& record) {
    const std::lock_guard lock(keep_mutex_);
    DataFile& data = plan_.files.at(record.file);
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
  const std::span<const ReadItem> items_;
  const bool verify_;
  const bool check_only_;
  const io::EngineOptions& options_;
  ReadReport& report_;
  DeviceSink* const sink_;  // nullptr: all items are in the host's memory
  ReadPlan plan_;
  WorkQueue<size_t> queue_;
  std::mutex keep_mutex_;  // guards data that several workers use in conclude(), keep() and add_damage()
};

// Calls `work` with rows in file order, for as many files at a time as may be open.
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

// One transfer reads many small records. A binary search finds the records that the disk cannot read. Records that were
// read before the failure are not read again.
void check_rows(std::span<const std::string> paths, const OpenFile& open, std::span<const ReadItem> items,
                std::span<const uint32_t> rows, const io::EngineOptions& options, ReadReport& report) {
  const auto [left, failure] = ReadJob(paths, open, items, rows, Purpose::check, options, report).check();
  if (!failure) return;
  if (left.size() <= 1) {
    for (const uint32_t item : left) report.damaged.push_back({item, failure->offset, failure->what(), failure->code});
    return;
  }
  const std::span<const uint32_t> all(left);
  check_rows(paths, open, items, all.first(all.size() / 2), options, report);
  check_rows(paths, open, items, all.subspan(all.size() / 2), options, report);
}

// `open`, or what opens the paths.
OpenFile opening(std::span<const std::string> paths, const io::EngineOptions& options, const OpenFile& open) {
  if (open) return open;
  return [paths, &options](uint32_t file) { return io::File::open(paths[file], options.widest, options.read_cached); };
}

}  // namespace

std::unique_ptr<ReadReport> read_tensors(std::span<const std::string> paths, std::span<const ReadItem> items,
                                         bool verify, const io::EngineOptions& options, DeviceSink* sink,
                                         const OpenFile& open) {
  if (sink == nullptr && std::ranges::any_of(items, [](const ReadItem& item) { return item.device >= 0; })) {
    throw Error::invalid("rows on a device, but nothing to copy them there");
  }
  const OpenFile opens = opening(paths, options, open);
  auto report = std::make_unique<ReadReport>();
  const Purpose purpose = verify ? Purpose::deliver_verified : Purpose::deliver;
  for_each_batch(items, [&](std::span<const uint32_t> rows) {
    ReadJob(paths, opens, items, rows, purpose, options, *report, sink).run();
  });
  std::sort(report->unread.begin(), report->unread.end());
  return report;
}

std::unique_ptr<ReadReport> check_tensors(std::span<const std::string> paths, std::span<const ReadItem> items,
                                          const io::EngineOptions& options, const OpenFile& open) {
  const OpenFile opens = opening(paths, options, open);
  auto report = std::make_unique<ReadReport>();
  for_each_batch(items,
                 [&](std::span<const uint32_t> rows) { check_rows(paths, opens, items, rows, options, *report); });
  std::sort(report->unread.begin(), report->unread.end());
  std::stable_sort(report->damaged.begin(), report->damaged.end(),
                   [](const DamagedItem& a, const DamagedItem& b) { return a.item < b.item; });
  return report;
}

}  // namespace vescale_ckpt::read
