// Writes records (framing and bytes) to a data file and checksums them in the same pass (write_ranges). Buffered writes
// to one file serialize on its inode lock, so records may then be spread over several files.
//
// The layout lets loads read large tensors directly into their memory: the file offset of a large tensor is congruent
// to its address modulo the block size (64 for torch's CPU allocator). So offsets depend on the sizes of all tensors,
// and on the addresses of large ones.
//
// A FileWriter is used by one thread and runs its own workers. Other threads may call progress() and cancel(). All
// other methods throw Error (io, full, cancelled, invalid).
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

// The page offset at which torch's CPU allocator places large tensors: the default block offset of a large body.
inline constexpr uint64_t kTorchOffset = 64;

// The source of a record: a tensor (framing set) or raw bytes. The memory must stay valid until write() returns. Each
// byte is read once, so data and checksum agree even if another thread modifies the memory. `unchanging` promises that
// none does: large tensors are then written from their own memory if its alignment allows.
struct RecordSource {
  std::shared_ptr<const format::TensorRecord> framing;
  const std::byte* data = nullptr;
  uint64_t bytes = 0;
  std::optional<io::Box> strided;  // layout of `data`, unless it is contiguous
  bool unchanging = false;
};

struct PlacedRecord {
  uint64_t offset;  // of the record in its file
  uint64_t length;
  uint32_t crc;       // CRC-32 of the tensor's bytes, or the object's; 0 without checksums
  uint32_t file = 0;  // index of the file, in the order of add_file()
};

class FileWriter {
 public:
  // Creates the file and reserves `expected_bytes` (an upper bound) on disk. A remote file appears under its name only
  // when it is finished. `most_files`: the most files that this writer may fill, see add_file().
  FileWriter(const std::string& path, uint64_t expected_bytes, const io::EngineOptions& options, bool checksums,
             uint32_t most_files = 1);
  // Removes the files unless finish() was reached.
  ~FileWriter();
  FileWriter(const FileWriter&) = delete;
  FileWriter& operator=(const FileWriter&) = delete;

  // Upper bound of the file length, with framing and padding, for records with bodies of these sizes.
  static uint64_t space_for(std::span<const int64_t> body_bytes);

  // The number of files to spread the records over: 1 if writes to one file do not serialize.
  uint32_t wanted_files() const { return wanted_files_; }
  // Creates one more file. Must be called before the first write().
  void add_file(const std::string& path);

  std::vector<PlacedRecord> write(std::span<const RecordSource> records);
  // For each file: writes the checksum table, sets the length, and syncs if `sync`. Removes added files that got no
  // record. Returns the total length.
  uint64_t finish(bool sync);

  // For formats without gaps between tensors. Writes the sources contiguously from `offset`, the end of the previous
  // call; in a remote file, calls after the first must start at a block boundary. Returns the CRC-32 of each block
  // (checksum_table.h), source by source; zeros without checksums.
  std::vector<uint32_t> write_dense(std::span<const RecordSource> sources, uint64_t offset);
  // Replaces finish() after write_dense(): writes `head` at offset 0. The file ends with the last source.
  uint64_t finish_dense(std::span<const std::byte> head, bool sync);

  // From any thread, at any time. Makes write() and finish() throw Error(cancelled), also those in progress.
  void cancel() {
    control_.cancel();
    for (const DataFile& data : files_) data.file->cancel();
  }
  uint64_t progress() const { return stats_.bytes(); }  // bytes written so far

  const io::TransferStats& stats() const { return stats_; }
  bool checksums() const { return checksums_; }

 private:
  struct DataFile {
    std::unique_ptr<io::File> file;
    uint64_t cursor = 0;  // end of the layout so far, a multiple of kBlock
    format::ChecksumTable table;
    bool used = false;  // has a record, perhaps an empty one
  };

  void begin(std::unique_ptr<io::File> file);
  struct Spread {
    std::vector<uint32_t> file_of;  // of each record
    std::vector<size_t> order;      // the records, file by file
  };
  Spread spread(std::span<const RecordSource> records) const;
  std::vector<PlacedTensor> lay_out(std::span<const RecordSource> sources, const Spread& spread) const;
  // Writes the tensors and points each at its block checksums, which are returned; zeros without checksums.
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

// --- Tables of records to write, which Python passes once per save: consecutive rows of 64-bit integers
// (write_table.cpp).

// Rows: dtype (with io::kUnchanging for RecordSource::unchanging), address, dimensions n, n sizes, n strides
// (elements). Throws Error(invalid, row).
std::vector<RecordSource> parse_write_table(std::span<const int64_t> table);

// Rows: address, bytes, for FileWriter::write_dense.
std::vector<RecordSource> parse_dense_table(std::span<const int64_t> table);

// The bytes of each row's tensor. Throws as above.
std::vector<int64_t> body_bytes(std::span<const int64_t> table);

// Hashes a sample of each tensor of a table for parse_write_table, so that a save detects memory that was modified
// without an in-place version bump.
//
// A sample is at most `elements` elements, evenly spaced in C order, so the hash does not depend on strides. `devices`:
// the device of each row, -1 for host memory; empty: all rows are in host memory. Rows on devices, and empty tensors,
// have hash 0. The memory must be readable. Throws Error(invalid, row).
std::vector<uint64_t> sample_hashes(std::span<const int64_t> table, std::span<const int64_t> devices,
                                    uint32_t elements);

}  // namespace vescale_ckpt::write
