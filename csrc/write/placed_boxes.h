// Boxes of tensors in memory, with their places in files, and what they contribute to the checksums of blocks there.
#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <utility>
#include <vector>

#include "io/box.h"
#include "io/transfer_control.h"
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
  // A table as for reads (read/read_table.h): file, offset of the tensor in it, bytes of the tensor, any number, dtype,
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

}  // namespace vescale_ckpt::write
