// Plans a read: the place of each record's bytes, how they are checked, and which ranges of the files are read into
// which memory.
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

// One stored record and all items that read from it.
struct Record {
  std::vector<uint32_t> items;  // rows of the caller's table
  uint32_t file = 0;
  uint64_t offset = 0, length = 0;
  std::shared_ptr<const format::TensorRecord> framing;  // null for a bare record
  uint64_t body_offset = 0, body_bytes = 0;             // place in the file
  enum class Check {
    frame,   // the whole record: prologue, bytes and epilogue must match
    crc,     // the whole body of a bare record or another layout: compares it with `crc`
    blocks,  // parts: compares each block with `blocks`
    none,
  } check = Check::frame;
  bool check_prologue = false;
  uint32_t crc = 0;                    // CRC-32 found in the file, for Check::crc
  int64_t expected_crc = kUnknownCrc;  // CRC-32 from the caller
  std::span<const uint32_t> blocks;

  // State of the read. Each part writes its own sum; the thread that makes `pending` zero reads all.
  std::atomic<uint64_t> pending{0};
  struct PartSum {
    uint32_t crc;
    uint64_t bytes;
  };
  std::vector<PartSum> sums;                  // one for each part of the body, by ascending offset
  std::vector<std::byte> prologue, epilogue;  // bytes found in the file
  bool unread = false;
  bool concluded = false;  // whether the rest need not be read

  uint64_t body_end() const { return body_offset + body_bytes; }
};

// An open data file, and its checksum table, which is read at its first use.
class DataFile {
 public:
  std::shared_ptr<io::File> file;

  // Transfers are cut at multiples of so many bytes.
  uint64_t block() const { return file->access() == io::Access::direct ? kBlock : 1; }
  // Returns the row with the record's checksums of blocks; nullptr if the file has no table, or the table has no row
  // that fits. Throws Error.
  const format::ChecksumTable::Row* row_of(const Record& record);
  std::span<const uint32_t> blocks(const format::ChecksumTable::Row& row) const { return table_->blocks(row); }

 private:
  bool table_looked_for_ = false;
  std::optional<format::ChecksumTable> table_;
};

// Reads the checksum table that a data file ends in; nullopt if there is no sound one. `at`: where it begins, or would.
// Throws Error.
std::optional<format::ChecksumTable> load_checksum_table(io::File& file, uint64_t& at);

// What a file range holds of one record.
struct RecordRange {
  uint32_t record;
  uint64_t begin, end;  // file range
  uint32_t sum;         // index into Record::sums, if it has body bytes
};

// The file range of one transfer.
struct FileRange {
  uint32_t file = 0;
  uint64_t begin = 0, end = 0;  // file range
  std::vector<RecordRange> parts;
  std::byte* in_place = nullptr;  // target of `begin` in a tensor; null: the transfer goes through a slot
};

class ReadPlan {
 public:
  // Plans on the calling thread, and opens the files. `rows`: the items to read, in the order of files and records.
  // Counts needed bytes, and unverified bytes of bare records, in `report`. All arguments except `rows` must outlive
  // the plan. Throws Error with the row as item; with Purpose::check it notes damage instead.
  ReadPlan(const OpenFile& open, std::span<const ReadItem> items, std::span<const uint32_t> rows, Purpose purpose,
           const io::EngineOptions& options, ReadReport& report);

  std::deque<Record> records;  // a deque, because atomics cannot be moved
  std::vector<FileRange> file_ranges;
  std::map<uint32_t, DataFile> files;  // {number: file}

 private:
  struct NeededRange {
    uint32_t record;
    uint64_t begin, end;  // file range
    std::byte* in_place;  // target; nullptr: it goes through a slot
  };

  void group_items(std::span<const uint32_t> rows);
  void plan_record(uint32_t index);
  DataFile& opened(uint32_t file, uint32_t row);
  bool locate_body(Record& record, DataFile& data, bool whole);
  void locate_bare(Record& record, bool whole);
  void choose_ranges(uint32_t index, Record& record, DataFile& data);
  void add_range(uint32_t index, uint64_t begin, uint64_t end, DataFile& data, uint64_t inner_begin,
                 uint64_t inner_end);
  uint64_t piece_bytes(const DataFile& data) const;
  uint64_t end_of_piece(uint64_t at, const DataFile& data) const;
  bool may_go_in_place(const Record& record, const DataFile& data) const;
  std::pair<uint64_t, uint64_t> in_place_range(const Record& record, const DataFile& data, uint64_t begin,
                                               uint64_t end) const;
  void pack_ranges();
  RecordRange part(uint32_t index, uint64_t begin, uint64_t end);

  const OpenFile& open_;
  const std::span<const ReadItem> items_;
  const bool verify_;
  const bool check_only_;
  const bool to_devices_;
  const io::EngineOptions& options_;
  ReadReport& report_;
  format::RecordCache framings_;
  std::vector<NeededRange> needed_;
};

// Notes an error as damage of each item of the record. The rest of the record is not read then.
void note_damage(Record& record, const Error& error, ReadReport& report);

// Makes the error for a sound record that is not the saved one: the file of another save has this name.
Error replaced_record(const Record& record, const std::string& path);

}  // namespace vescale_ckpt::read
