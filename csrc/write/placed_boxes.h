// Boxes of tensors in memory with their file offsets and their contributions to block checksums; and a writer for them.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "io/box.h"
#include "io/transfer.h"
#include "write/write_ranges.h"

namespace vescale_ckpt::write {

struct PlacedBox {
  uint32_t file;
  PlacedTensor source;                                                         // `place.file` is null
  uint64_t begin() const { return source.place.begin + source.box->begin(); }  // in the file
  uint64_t end() const { return source.place.begin + source.box->end(); }
};

class PlacedBoxes {
 public:
  // A table as for reads (read/reader.h): file, offset of the tensor in it, bytes of the tensor, a number that is
  // ignored, dtype, dimensions n, n sizes of the tensor, n offsets of the box, n sizes, address of its first element,
  // n strides. `files`: how many there are. Throws Error(invalid, row).
  PlacedBoxes(std::span<const int64_t> table, size_t files);
  PlacedBoxes(const PlacedBoxes&) = delete;
  PlacedBoxes& operator=(const PlacedBoxes&) = delete;

  // All non-empty boxes, ordered by file and offset.
  std::span<PlacedBox> boxes() { return boxes_; }

  // The contributions to block checksums (write/write_ranges.h), one row per box: file, offset of the tensor in it and
  // bytes of the box (each as low and high word), first cell relative to the tensor's first, number of cells n, n
  // words.
  std::vector<uint32_t> take_checksums() { return std::move(checksums_); }

  static constexpr size_t kChecksumHead = 7;

 private:
  std::deque<io::Box> of_memory_;
  std::vector<PlacedBox> boxes_;
  std::vector<uint32_t> checksums_;
};

// Writes one rank's boxes to files that several ranks fill, each box at its final offset. The files already have their
// final length; the coordinator writes their headers.
//
// A BoxWriter is used by one thread and runs its own workers. Other threads may call progress() and cancel().
class BoxWriter {
 public:
  // Files are opened at their first write.
  BoxWriter(std::vector<std::string> paths, const io::EngineOptions& options);

  // Throws Error: io, full, cancelled, or invalid with the row of the table.
  void write(std::span<const int64_t> boxes);  // as PlacedBoxes takes them

  // Syncs if `sync`. Returns the checksum contributions of all boxes, as PlacedBoxes::take_checksums.
  std::vector<uint32_t> finish(bool sync);

  // From any thread, at any time, like FileWriter::cancel().
  void cancel() { control_.cancel(); }
  uint64_t progress() const { return stats_.bytes(); }
  const io::TransferStats& stats() const { return stats_; }

 private:
  const io::EngineOptions options_;
  const std::vector<std::string> paths_;
  std::vector<std::unique_ptr<io::File>> files_;
  std::vector<uint32_t> checksums_;
  io::TransferStats stats_;
  io::TransferControl control_;
};

}  // namespace vescale_ckpt::write
