// Writes records (framing and bytes) to a data file, at the speed of the disk, with checksums on the way. Writes
// through the page cache take the lock of the file's inode, so there records may be spread over several files.
//
// The file is laid out so that loads can read large tensors straight into their memory: their bytes start as far behind
// a block of the file as behind a page, which is 64 bytes where torch's CPU allocator put them. Offsets depend on
// sizes, and on where large tensors lie in a page.
//
// One thread calls a FileWriter, which runs workers of its own. Other threads may call progress() and cancel(). All but
// these throw Error (io, full, cancelled, invalid).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "format/checksum_table.h"
#include "format/torch_record.h"
#include "io/box.h"
#include "io/file.h"
#include "io/transfer.h"
#include "write/write_ranges.h"

namespace vescale_ckpt::write {

// Where in a block torch's CPU allocator puts a large tensor's first byte by default. A large body begins there unless
// its own memory asks for another place.
inline constexpr uint64_t kTorchOffset = 64;

// A record's source: a tensor (framing set) or raw bytes. The memory must stay valid until write() returns. Each byte
// is read once, so data and checksum agree even if another thread changes the memory meanwhile. `unchanging`: no thread
// does, so large tensors are written from their own memory where its address allows.
struct RecordSource {
  std::shared_ptr<const format::TensorRecord> framing;
  const std::byte* data = nullptr;
  uint64_t bytes = 0;
  std::optional<io::Box> strided;  // how `data` is laid out, unless contiguous
  bool unchanging = false;
};

struct PlacedRecord {
  uint64_t offset;  // where the record begins in the file
  uint64_t length;
  uint32_t crc;       // CRC-32 of the tensor's bytes, or the object's; 0 without checksums
  uint32_t file = 0;  // its number, where others were added
};

class FileWriter {
 public:
  // Creates the file; `expected_bytes` (an estimate from above) is reserved on disk. A remote file appears under its
  // name when it is finished. `most_files`: how many this writer may fill, if others are added.
  FileWriter(const std::string& path, uint64_t expected_bytes, const io::EngineOptions& options, bool checksums,
             uint32_t most_files = 1);
  // Removes the files unless finish() was reached.
  ~FileWriter();
  FileWriter(const FileWriter&) = delete;
  FileWriter& operator=(const FileWriter&) = delete;

  // Upper bound of the file's length for records with so many bytes of data each, framing and padding included.
  static uint64_t space_for(std::span<const int64_t> body_bytes);

  // How many files the records should be spread over: 1 where writes to one file do not wait for each other.
  uint32_t wanted_files() const { return wanted_files_; }
  // Creates one more file for the records of all calls of write(). Before the first of them.
  void add_file(const std::string& path);

  std::vector<PlacedRecord> write(std::span<const RecordSource> records);
  // Writes the checksum table, sets the length, syncs if asked to, each file. Removes added files without records.
  // Returns the length of all.
  uint64_t finish(bool sync);

  // For formats that leave no room between tensors. Writes the sources' bytes one behind another from `offset` on,
  // where the call before ended; to a remote file from a block on, unless it is the first call. Returns the CRC-32 of
  // each block (checksum_table.h), source by source; zeros if the writer has no checksums.
  std::vector<uint32_t> write_dense(std::span<const RecordSource> sources, uint64_t offset);
  // Instead of finish(), after write_dense(): `head` is what stands before it. The file ends with the last source.
  uint64_t finish_dense(std::span<const std::byte> head, bool sync);

  // From any thread, at any time. After cancel() write() and finish() throw Error(cancelled), soon where one is
  // running.
  void cancel() {
    control_.cancel();
    for (const DataFile& data : files_) data.file->cancel();
  }
  uint64_t progress() const { return stats_.bytes(); }  // bytes given to the file so far

  const io::TransferStats& stats() const { return stats_; }
  bool checksums() const { return checksums_; }

 private:
  struct DataFile {
    std::unique_ptr<io::File> file;
    uint64_t cursor = 0;  // end of what was laid out, a multiple of kBlock
    format::ChecksumTable table;
    bool used = false;  // has a record, perhaps one without bytes
  };

  void begin(std::unique_ptr<io::File> file);
  struct Spread {
    std::vector<uint32_t> file_of;  // of each record
    std::vector<size_t> order;      // the records, file by file
  };
  Spread spread(std::span<const RecordSource> records) const;
  std::vector<PlacedTensor> lay_out(std::span<const RecordSource> sources, const Spread& spread) const;
  // Writes the tensors. Returns the checksums of all their blocks, of which each is given its own; zeros without
  // checksums.
  std::vector<uint32_t> send(std::span<PlacedTensor> tensors, Edges edges);
  uint64_t seal(DataFile& data, bool sync);

  const io::EngineOptions options_;
  const bool checksums_;
  uint32_t wanted_files_ = 1;
  uint64_t expected_bytes_;  // of each file
  std::vector<DataFile> files_;
  bool finished_ = false;
  io::TransferStats stats_;
  io::TransferControl control_;
};

// --- The table of what to write that crosses from Python once a save: rows of 64-bit integers, one after another
// (write_table.cpp).

// Rows: dtype (and io::kUnchanging, so that the writer needs no copy), address, dimensions n, n sizes, n strides
// (elements). Throws Error(invalid, row).
std::vector<RecordSource> parse_write_table(std::span<const int64_t> table);

// Rows: address, bytes, for FileWriter::write_dense.
std::vector<RecordSource> parse_dense_table(std::span<const int64_t> table);

// The bytes of each row's tensor. Throws as above.
std::vector<int64_t> body_bytes(std::span<const int64_t> table);

// Hashes of a few elements of tensors, by which a save notices that memory was changed without a word.
//
// One hash for each row of a table for parse_write_table, of at most so many elements, evenly from one end to the other
// in C's order: copies with other strides have the same. `devices`: the device of each row, -1 for host memory; empty:
// all are there. The hash of a row on a device, or without elements, is 0. The memory of the tensors must be there.
// Throws Error(invalid, row).
std::vector<uint64_t> sample_hashes(std::span<const int64_t> table, std::span<const int64_t> devices,
                                    uint32_t elements);

}  // namespace vescale_ckpt::write
