// Reads tensors, or boxes of them, out of data files into memory that the caller owns, verifying what it reads.
//
// Whole tensors are checked against the CRC-32 in their record, whoever wrote it; boxes against the blocks of the
// file's checksum table, or by reading the whole record where there is none. Records that are not the plain contiguous
// tensor the caller expects are left to it (see ReadReport::unread).
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
#include "io/transfer_loop.h"
#include "io/transfer_stats.h"

namespace vescale_ckpt::read {

inline constexpr int64_t kUnknownCrc = -1;
inline constexpr int64_t kNoneFollows = -1;

struct ReadItem {
  uint32_t file;           // index into the paths
  uint64_t record_offset;  // where .metadata says the record lies, bytes
  uint64_t record_length;
  uint32_t dtype;  // index into dtypes()
  std::vector<int64_t> chunk_sizes;
  io::Box box;        // of the chunk, over `memory`
  std::byte* memory;  // of the box's first element
  // Of the whole tensor's bytes, where the caller knows it from elsewhere than the data file.
  int64_t crc = kUnknownCrc;

  // The record is the tensor's bytes and nothing else, and `crc` is not used. `blocks` are its checksums, of each cell
  // (format/checksum_table.h); without them it cannot be verified.
  bool bare = false;
  std::span<const uint32_t> blocks = {};

  int device = -1;  // the accelerator that `memory` is on; -1: the host's memory
  // Bytes that nobody needs between the end of `memory` and the next item in the same allocation of the accelerator, so
  // that one copy may fill both. kNoneFollows: no item is known to be there. Of dense boxes only.
  int64_t gap_behind = kNoneFollows;
};

// Takes what is read for items on accelerators. Thread-safe, but for its batches, each of which belongs to one thread.
class DeviceSink {
 public:
  // What one slot holds for accelerators.
  class Batch {
   public:
    virtual ~Batch() = default;
    // What lies in the body range [begin, end) of the item's box; `body` points at body offset `begin`, in the slot.
    virtual void add(const ReadItem& item, const std::byte* body, uint64_t begin, uint64_t end) = 0;
    virtual void send(Slot slot) = 0;  // begins the copies, and gives the slot back when they are done
  };

  virtual ~DeviceSink() = default;
  virtual void prepare(std::span<std::byte> slot) = 0;  // called before each use of a slot
  virtual std::unique_ptr<Batch> begin() = 0;
};

struct DamagedItem {
  uint32_t item;    // row of the caller's table
  uint64_t offset;  // in its file
  std::string reason;
  int code = 0;  // the errno with which the file could not be opened or read; 0: its bytes came, and are wrong
};

struct ReadReport {
  std::vector<DamagedItem> damaged;  // only by check_tensors; in rising order of items
  std::vector<uint32_t> unread;      // items whose record is not a plain contiguous tensor of that dtype and shape
  uint64_t needed_bytes = 0;         // in the items' boxes
  uint64_t unverified_bytes = 0;     // read from records that carry no checksum
  io::TransferStats stats;
};

// Throws Error: corrupt (with the item), io, invalid, device. The items' memory is undefined then. What is read for
// items on accelerators goes to `sink`, whose copies may be under way when this returns or throws.
std::unique_ptr<ReadReport> read_tensors(std::span<const std::string> paths, std::span<const ReadItem> items,
                                         bool verify, const io::EngineOptions& options, DeviceSink* sink = nullptr);
// Gives a file by its number, to be held while it is read from. Throws Error. Called from the thread of the read.
using OpenFile = std::function<std::shared_ptr<io::File>(uint32_t file)>;
// The same of files that `open` gives; their paths are for errors.
std::unique_ptr<ReadReport> read_tensors(std::span<const std::string> paths, const OpenFile& open,
                                         std::span<const ReadItem> items, bool verify, const io::EngineOptions& options,
                                         DeviceSink* sink = nullptr);

// Reads whole tensors and only checks them: `memory` is not used. Damage is reported in `damaged` and not thrown; so is
// an I/O error, or a missing file, for each item that it affects. Takes slots for memory, whatever the tensors'
// size.
std::unique_ptr<ReadReport> check_tensors(std::span<const std::string> paths, std::span<const ReadItem> items,
                                          const io::EngineOptions& options);
std::unique_ptr<ReadReport> check_tensors(std::span<const std::string> paths, const OpenFile& open,
                                          std::span<const ReadItem> items, const io::EngineOptions& options);

}  // namespace vescale_ckpt::read
