// Reads tensors, or boxes of them, from data files into the caller's memory, and verifies them.
//
// Whole tensors are compared with the CRC-32 in their record, whoever wrote it. Boxes are compared with the blocks of
// the file's checksum table; if there is no table, the whole record is read. A record that is not the contiguous tensor
// which the caller expects is left to the caller (see ReadReport::unread).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/memory.h"
#include "format/torch_record.h"
#include "io/box.h"
#include "io/transfer.h"

namespace vescale_ckpt::read {

inline constexpr int64_t kUnknownCrc = -1;

struct ReadItem {
  uint32_t file;           // index into the paths
  uint64_t record_offset;  // offset of the record in .metadata, bytes
  uint64_t record_length;
  uint32_t dtype;  // index into dtypes()
  std::vector<int64_t> chunk_sizes;
  io::Box box;        // box of the chunk, over `memory`
  std::byte* memory;  // address of the box's first element
  // CRC-32 of the whole tensor's bytes, if the caller knows it from another place than the data file.
  int64_t crc = kUnknownCrc;

  // Whether the record has only the tensor's bytes. Then `crc` is not used, and `blocks` are the checksums of each cell
  // (format/checksum_table.h); without them the record cannot be verified.
  bool bare = false;
  std::span<const uint32_t> blocks = {};

  int device = -1;  // the accelerator that `memory` is on; -1: the host's memory
};

// Takes the data of items on accelerators. Thread-safe, except its batches, each of which belongs to one thread.
class DeviceSink {
 public:
  // The data of one slot for accelerators.
  class Batch {
   public:
    virtual ~Batch() = default;
    // Adds the body range [begin, end) of the item's box. `body` points to body offset `begin` in the slot.
    virtual void add(const ReadItem& item, const std::byte* body, uint64_t begin, uint64_t end) = 0;
    virtual void send(Slot slot) = 0;  // begins the copies, and gives the slot back when they are done
  };

  virtual ~DeviceSink() = default;
  virtual void prepare(std::span<std::byte> slot) = 0;  // called before each use of a slot
  virtual std::unique_ptr<Batch> begin() = 0;
};

struct DamagedItem {
  uint32_t item;    // row of the caller's table
  uint64_t offset;  // offset in its file
  std::string reason;
  int code = 0;  // errno of a failed open or read; 0: its bytes came, and are wrong
};

struct ReadReport {
  std::vector<DamagedItem> damaged;  // filled only by check_tensors, by ascending item
  std::vector<uint32_t> unread;      // items whose record is not a contiguous tensor of that dtype and shape
  uint64_t needed_bytes = 0;         // bytes of the items' boxes
  uint64_t unverified_bytes = 0;     // bytes from records without checksums
  io::TransferStats stats;
};

// Opens a file by its index; the result is held during reads. Throws Error. The thread of the read calls it.
using OpenFile = std::function<std::shared_ptr<io::File>(uint32_t file)>;

// Throws Error: corrupt (with the item), io, invalid, device. The items' memory is undefined then. Data for items on
// accelerators goes to `sink`, whose copies may still run when this returns or throws. `open`: nullptr opens the paths,
// which are for errors otherwise.
std::unique_ptr<ReadReport> read_tensors(std::span<const std::string> paths, std::span<const ReadItem> items,
                                         bool verify, const io::EngineOptions& options, DeviceSink* sink = nullptr,
                                         const OpenFile& open = nullptr);

// Reads and checks whole tensors; `memory` is not used. Reports damage in `damaged` instead of throwing; also an I/O
// error or a missing file, for each affected item. Needs only slots of memory, whatever the tensors' sizes.
std::unique_ptr<ReadReport> check_tensors(std::span<const std::string> paths, std::span<const ReadItem> items,
                                          const io::EngineOptions& options, const OpenFile& open = nullptr);

// A range of a file, taken as it is.
ReadItem range_item(uint32_t file, uint64_t offset, uint64_t length, std::byte* memory);

// --- The tables of reads that Python gives once a load: rows of 64-bit integers, one after another (read_table.cpp).

// Rows: file, record offset, record length, CRC-32 of the tensor or -1, dtype, dimensions n, n chunk sizes, n box
// offsets, n box sizes, address of the box's first element, n strides (elements). `devices`: the device of each row,
// -1: host memory; empty: all rows are in host memory. Throws Error(invalid, row).
std::vector<ReadItem> parse_read_table(std::span<const int64_t> table, std::span<const int64_t> devices = {});

// Rows: file, record offset, record length, CRC-32 of the tensor or -1, dtype, dimensions n, n sizes. They are whole
// tensors without memory, for check_tensors. Throws Error(invalid, row).
std::vector<ReadItem> parse_check_table(std::span<const int64_t> table);

}  // namespace vescale_ckpt::read
