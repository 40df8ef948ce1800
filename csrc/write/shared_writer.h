// Writes one rank's boxes of tensors to files that several ranks fill, each box at its final offset. The files exist in
// their final length; the coordinator writes their headers.
//
// One thread calls a SharedWriter, which runs workers of its own. Other threads may call progress() and cancel().
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "io/box.h"
#include "write/tiles.h"

namespace vescale_ckpt::write {

class SharedWriter {
 public:
  // Of `targets`, a row for each box: file, offset of its tensor in the file, dtype, dimensions n, n sizes of the
  // tensor, n offsets of the box in it, n sizes of the box. A file is opened when it is first written to.
  // Throws Error(invalid, row).
  SharedWriter(std::vector<std::string> paths, std::span<const int64_t> targets, const io::EngineOptions& options);

  // `table`: of memory, as for FileWriter::write (write/table.h); `rows`: which target each row of it is written to.
  // Throws Error: io, full, cancelled, or invalid with the row of the table.
  void write(std::span<const int64_t> table, std::span<const int64_t> rows);

  // Syncs if asked to. Returns what this writer contributes to the checksums of blocks (write/tiles.h): for each target
  // a word for each cell of its file from its first byte to its last.
  std::span<const uint32_t> finish(bool sync);

  // From any thread, at any time: as FileWriter's.
  void cancel() { control_.cancel(); }
  uint64_t progress() const { return stats_.bytes(); }
  const io::TransferStats& stats() const { return stats_; }

 private:
  struct Target {
    uint32_t file;
    uint32_t dtype;
    uint64_t begin, end;             // of the tensor, in the file
    uint64_t first_block;            // in blocks_
    std::span<const int64_t> boxes;  // in targets_: three for each dimension
    std::span<const int64_t> sizes(size_t which) const {
      return boxes.subspan(which * boxes.size() / 3, boxes.size() / 3);
    }
  };
  io::File* opened(uint32_t file);

  const io::EngineOptions options_;
  const std::vector<std::string> paths_;
  const std::vector<int64_t> table_;
  std::vector<Target> targets_;
  std::vector<std::unique_ptr<io::File>> files_;
  std::vector<uint32_t> blocks_;
  io::TransferStats stats_;
  io::TransferControl control_;
};

}  // namespace vescale_ckpt::write
