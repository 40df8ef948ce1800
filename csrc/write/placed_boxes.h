// Boxes of tensors in memory, with their places in files, and what they contribute to the checksums of blocks there;
// and their writer.
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
  // A table as for reads (read/reader.h): file, offset of the tensor in it, bytes of the tensor, any number, dtype,
  // dimensions n, n sizes of the tensor, n offsets of the box, n sizes, address of its first element, n strides.
  // `files`: how many there are. Throws Error(invalid, row).
  PlacedBoxes(std::span<const int64_t> table, size_t files);
  PlacedBoxes(const PlacedBoxes&) = delete;
  PlacedBoxes& operator=(const PlacedBoxes&) = delete;

  // Those that are not empty, in the order of files and offsets.
  std::span<PlacedBox> boxes() { return boxes_; }

  // What was added for these boxes (write/write_ranges.h), a row for each: file, offset of the tensor in it and bytes
  // of the box (low and high words), number of the first cell from the tensor's first on, number of cells, a word for
  // each.
  std::vector<uint32_t> take_checksums() { return std::move(checksums_); }

  static constexpr size_t kChecksumHead = 7;

 private:
  std::deque<io::Box> of_memory_;
  std::vector<PlacedBox> boxes_;
  std::vector<uint32_t> checksums_;
};

// Adds what the boxes contribute to the checksums, without writing them.
void add_checksums(PlacedBoxes& boxes, const io::EngineOptions& options);

// How much a thread copies or sums at once, at most.
inline constexpr uint64_t kBoxStep = 1 << 20;
static_assert(kBoxStep % format::kChecksumBlock == 0);

// Adds a part of a box, [begin, end) of its file, to its checksums. With `out` it copies the part there.
void add_part(const PlacedBox& box, uint64_t begin, uint64_t end, std::byte* out);

// Writes one rank's boxes of tensors to files that several ranks fill, each box at its final offset. The files exist in
// their final length; the coordinator writes their headers.
//
// One thread calls a BoxWriter, which runs workers of its own. Other threads may call progress() and cancel().
class BoxWriter {
 public:
  // A file is opened when it is first written to.
  BoxWriter(std::vector<std::string> paths, const io::EngineOptions& options);

  // Throws Error: io, full, cancelled, or invalid with the row of the table.
  void write(std::span<const int64_t> boxes);  // as PlacedBoxes takes them

  // Syncs if asked to. Returns what this writer contributes to the checksums of blocks, as PlacedBoxes::take_checksums.
  std::vector<uint32_t> finish(bool sync);

  // From any thread, at any time: as FileWriter's.
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
