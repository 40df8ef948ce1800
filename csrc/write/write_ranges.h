// Writes tensors at given file offsets, in block-aligned ranges of at most one slot. A range may hold many small
// tensors, the end of one and the start of the next, a piece of a large one, or a few rows of a column shard.
//
// Bytes are copied to a slot, or to the buffer of a remote part, and checksummed there, so that file and checksum agree
// even if another thread modifies the tensor during the write. Only tensors marked `unchanging` are written from their
// own memory. Blocks that other writers may share go through the page cache, and only the bytes of this writer: there
// is no read-modify-write that could undo a concurrent write.
//
// Block checksums are assembled from pieces in any order, by any thread or rank: a piece contributes its CRC-32 shifted
// to its position in the block (crc32_combine with the bytes that follow), and the block's CRC-32 is the XOR of all
// contributions. A record's epilogue holds the CRC-32 of its tensor, so a range with an epilogue waits for the ranges
// that hold the rest of that tensor.
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

// Shorter runs of a box are written through the page cache, many per range.
inline constexpr uint64_t kShortRun = 512 << 10;

// Returns the options. Throws Error(invalid) unless slots are a multiple of the checksum block and have room to spare
// for any record that is not large.
const io::EngineOptions& usable_for_writing(const io::EngineOptions& options);

// The extent of a tensor in a file, and its contributions to the file's block checksums: one word for each cell from
// `first_cell` on, initially 0. Empty `blocks`: no checksums.
struct TensorPlace {
  io::File* file = nullptr;
  uint64_t begin = 0, end = 0;  // in the file
  uint64_t first_cell = 0;
  std::span<uint32_t> blocks;
};

// A tensor to write, or, if `box` is set, a box of it over strided memory.
struct PlacedTensor {
  TensorPlace place;
  const std::byte* data = nullptr;  // address of the first element
  const io::Box* box = nullptr;
  // The record's prologue and epilogue, if any. An epilogue is never split, so a small record that does not fit in the
  // rest of a slot starts a new range.
  const format::TensorRecord* framing = nullptr;
  bool apart = false;       // starts a new range at a block boundary
  bool unchanging = false;  // no thread modifies the memory during the write

  uint64_t begin() const { return place.begin - (framing != nullptr ? framing->prologue().size() : 0); }
  uint64_t end() const { return place.end + (framing != nullptr ? framing->epilogue_bytes() : 0); }
};

enum class Edges {
  exclusive,  // this is the only writer of the files: gaps and partial blocks are filled with zeros
  shared,     // others write to the same files, and perhaps to the same blocks
};

// Adds the bytes of a tensor at file offset `at` to the checksums of their blocks, and copies them to `out` unless it
// is null. Prologues have no checksums. Thread-safe.
void add_checksum(const TensorPlace& place, uint64_t at, const std::byte* data, uint64_t bytes, std::byte* out);

// Writes all sources, which are grouped by file, in ascending order and without overlap within a file. They and the
// memory that they refer to must outlive the call. Throws the first Error.
void write_ranges(std::span<const PlacedTensor> sources, Edges edges, const io::EngineOptions& options,
                  io::TransferControl& control, io::TransferStats& stats);

}  // namespace vescale_ckpt::write
