// Ranges of tensors that lie in files without a gap, as safetensors wants them: whole files of one writer, or what one
// of several writers has of files that they share. Segments are cut where it suits the disk, so one may hold the end of
// one tensor and the start of the next, or only a few rows of a column shard.
//
// A block that another writer may share is written through the page cache, and only the bytes that are ours: nothing is
// read, so nothing that others write meanwhile is undone. All else goes as FileWriter's records do.
//
// Checksums of blocks are put together from pieces in any order, by any thread or rank: what a piece contributes is its
// CRC-32 moved to its place in its block (crc32_combine with what follows it), and a block's CRC-32 is the exclusive or
// of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "format/checksum_table.h"
#include "io/box.h"
#include "io/file.h"
#include "io/transfer_control.h"
#include "io/transfer_loop.h"
#include "io/transfer_stats.h"

namespace vescale_ckpt::write {

// Where a tensor lies in a file, and what is contributed to the checksums of its blocks: for each cell of the file that
// is written to, from the first of them on; zeros before the first piece. No blocks: no checksums.
struct TensorPlace {
  io::File* file = nullptr;
  uint64_t begin = 0, end = 0;  // in the file
  uint64_t first_cell = 0;
  std::span<uint32_t> blocks;
};

// What is written of one tensor: all of it (no box), or a box, which is of the tensor's bytes over strided memory.
struct TileSource {
  TensorPlace place;
  const std::byte* data = nullptr;  // of the first element
  const io::Box* box = nullptr;
};

enum class TileEdges {
  ours,    // nobody else writes to the files: blocks are filled up with zeros
  shared,  // others write to the same files, and perhaps to the same blocks
};

// Writes them all. Within a file sources come in rising order and do not overlap; sources of one file follow each
// other. They, and what they point to, live until this returns. Throws the first Error.
void write_tiles(std::span<const TileSource> sources, TileEdges edges, const io::EngineOptions& options,
                 io::TransferControl& control, io::TransferStats& stats);

}  // namespace vescale_ckpt::write
