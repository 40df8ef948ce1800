// Writes tensors to their places in files, by ranges of a file of at most one slot, cut where it suits the disk. A
// range may hold many small tensors, the end of one and the start of the next, a piece of a large one, or only a few
// rows of a column shard.
//
// Bytes pass through a slot, or a part of a remote file: what is checksummed there is what the system gets, however
// often it reads it, even if another thread changes the tensor meanwhile. Only pieces of tensors that do not change are
// written from their own memory. A block that another writer may share is written through the page cache, and only the
// bytes that are ours: nothing is read, so nothing that others write meanwhile is undone.
//
// Checksums of blocks are put together from pieces in any order, by any thread or rank: what a piece contributes is its
// CRC-32 moved to its place in its block (crc32_combine with what follows it), and a block's CRC-32 is the exclusive or
// of them. A record's epilogue holds its tensor's CRC-32, so a range with an epilogue waits for the ranges that hold
// other pieces of that tensor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "format/checksum_table.h"
#include "format/torch_record.h"
#include "io/box.h"
#include "io/file.h"
#include "io/transfer.h"

namespace vescale_ckpt::write {

// Runs of a box in a file that are shorter go through the page cache, many for one range.
inline constexpr uint64_t kShortRun = 512 << 10;

// The options, if slots hold whole cells of checksums, and any record that is not large with room to spare. Throws
// Error(invalid) otherwise.
const io::EngineOptions& usable_for_writing(const io::EngineOptions& options);

// Where a tensor lies in a file, and what is contributed to the checksums of its blocks: for each cell of the file that
// is written to, from the first of them on; zeros before the first piece. No blocks: no checksums.
struct TensorPlace {
  io::File* file = nullptr;
  uint64_t begin = 0, end = 0;  // in the file
  uint64_t first_cell = 0;
  std::span<uint32_t> blocks;
};

// What is written of one tensor: all of it (no box), or a box, which is of the tensor's bytes over strided memory.
struct PlacedTensor {
  TensorPlace place;
  const std::byte* data = nullptr;  // where the first element is
  const io::Box* box = nullptr;
  // What stands before the tensor and behind it, if anything. Epilogues are not cut, so a record that is not large is
  // set apart where a slot does not hold it with what is before it.
  const format::TensorRecord* framing = nullptr;
  bool apart = false;       // begins a range, on a block of its own
  bool unchanging = false;  // no thread changes the memory

  uint64_t begin() const { return place.begin - (framing != nullptr ? framing->prologue().size() : 0); }
  uint64_t end() const { return place.end + (framing != nullptr ? framing->epilogue_bytes() : 0); }
};

enum class Edges {
  ours,    // nobody else writes to the files: blocks are filled up, and gaps filled, with zeros
  shared,  // others write to the same files, and perhaps to the same blocks
};

// Adds a tensor's bytes, which lie at `at` in the file, to the checksums of its blocks, copying them on the way if
// there is where to. A prologue has no checksums. Thread-safe.
void add_checksum(const TensorPlace& place, uint64_t at, const std::byte* data, uint64_t bytes, std::byte* out);

// Writes them all. Within a file sources come in rising order and do not overlap; sources of one file follow each
// other. They, and what they point to, live until this returns. Throws the first Error.
void write_ranges(std::span<const PlacedTensor> sources, Edges edges, const io::EngineOptions& options,
                  io::TransferControl& control, io::TransferStats& stats);

}  // namespace vescale_ckpt::write
