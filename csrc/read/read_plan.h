// Plans a read: where the bytes of each wanted record lie, how they are checked, and which ranges of the files are read
// where to.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "format/checksum_table.h"
#include "read/reader.h"

namespace vescale_ckpt::read {

enum class Purpose { deliver, deliver_verified, check };

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

// A data file that is held open, and its checksum table, read when it is first asked for.
class DataFile {
 public:
  std::shared_ptr<io::File> file;

  // What transfers are cut on, bytes.
  uint64_t block() const { return file->access() == io::Access::direct ? kBlock : 1; }
  // Of the record, checksums of blocks; nullptr if the file has no table, or none that fits the record. Throws Error.
  const format::ChecksumTable::Row* row_of(const Record& record);
  std::span<const uint32_t> blocks(const format::ChecksumTable::Row& row) const { return table_->blocks(row); }

 private:
  void load_table();
  bool table_looked_for_ = false;
  std::optional<format::ChecksumTable> table_;
};

// A contiguous file range of one record within one segment.
struct Part {
  uint32_t record;
  uint64_t begin, end;  // in the file
  uint32_t sum;         // index into Record::sums, if it has body bytes
};

// What one transfer reads.
struct Segment {
  uint32_t file = 0;
  uint64_t begin = 0, end = 0;  // in the file
  std::vector<Part> parts;
  std::byte* in_place = nullptr;  // where `begin` goes, if straight into a tensor; else through a slot
};

class ReadPlan {
 public:
  // Plans on the calling thread, and opens the files. `rows`: those of `items` to read, in the order of files and
  // records. Counts needed bytes, and unverified ones of bare records, in `report`. All arguments but `rows` must
  // outlive the plan. Throws Error with the row as item; with Purpose::check it notes damage instead.
  ReadPlan(const OpenFile& open, std::span<const ReadItem> items, std::span<const uint32_t> rows, Purpose purpose,
           const io::EngineOptions& options, ReadReport& report);

  std::deque<Record> records;  // addresses stay: they hold atomics
  std::vector<Segment> segments;
  std::map<uint32_t, DataFile> files;  // by number

 private:
  struct Extent {
    uint32_t record;
    uint64_t begin, end;  // in the file
    std::byte* in_place;  // where it goes, nullptr: through a slot
    bool joins = false;   // it may be read in place together with those that it lies between in file and memory
  };

  void group_items(std::span<const uint32_t> rows);
  void plan_record(uint32_t index);
  DataFile& opened(uint32_t file, uint32_t row);
  bool locate_body(Record& record, DataFile& data, bool whole);
  void locate_bare(Record& record, bool whole);
  void choose_extents(uint32_t index, Record& record, DataFile& data);
  void add_range(uint32_t index, uint64_t begin, uint64_t end, DataFile& data, uint64_t inner_begin,
                 uint64_t inner_end);
  uint64_t piece_bytes(const DataFile& data) const;
  uint64_t end_of_piece(uint64_t at, const DataFile& data) const;
  bool may_go_in_place(const Record& record, const DataFile& data) const;
  std::pair<uint64_t, uint64_t> in_place_range(const Record& record, const DataFile& data, uint64_t begin,
                                               uint64_t end) const;
  void join_extents();
  void add_run(std::span<const Extent> run);
  void pack_extents();
  bool continues(const Extent& extent) const;
  Part part(uint32_t index, uint64_t begin, uint64_t end);

  const OpenFile& open_;
  const std::span<const ReadItem> items_;
  const bool verify_;
  const bool check_only_;
  const bool to_devices_;
  const io::EngineOptions& options_;
  ReadReport& report_;
  format::RecordCache framings_;
  std::vector<Extent> extents_;  // in the order of files, once they are joined
};

// Notes an error as damage of each item of the record, of which nothing more is to be read then.
void note_damage(Record& record, const Error& error, ReadReport& report);

// The error for a record that is sound, but not the one that was saved: a file of another save under this name.
Error replaced_record(const Record& record, const std::string& path);

}  // namespace vescale_ckpt::read
