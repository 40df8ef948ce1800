// A box of a contiguous (row-major) chunk laid over strided memory, and copies between the two: of one, or of many at
// once.
//
// "Body" offsets are bytes from the start of the chunk's data; memory offsets are bytes from the box's first element.
// Immutable; thread-safe.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace vescale_ckpt::io {

class Box {
 public:
  struct Dim {
    uint64_t count;
    uint64_t body_stride;   // bytes
    int64_t memory_stride;  // bytes
    auto operator<=>(const Dim&) const = default;
  };

  // All spans have one entry a dimension; `memory_strides` are in elements and may be zero or negative.
  // Throws Error(invalid) if the box leaves the chunk.
  Box(uint32_t item_bytes, std::span<const int64_t> chunk_sizes, std::span<const int64_t> box_offsets,
      std::span<const int64_t> box_sizes, std::span<const int64_t> memory_strides);

  // The same box in a larger chunk, in which the chunk's data begin at body offset `bytes`.
  Box in_larger(uint64_t bytes) const;

  uint64_t bytes() const { return bytes_; }  // in the box
  uint64_t begin() const { return begin_; }  // body range that covers the box
  uint64_t end() const { return end_; }
  bool dense() const { return dims_.empty(); }  // one run, in the body and in memory
  bool whole() const { return whole_; }         // the box is the chunk

  // Copies what lies in the body range [begin, end) of the box; `body` points at body offset `begin`.
  void scatter(const std::byte* body, uint64_t begin, uint64_t end, std::byte* memory) const;
  void gather(std::byte* body, uint64_t begin, uint64_t end, const std::byte* memory) const;

  // How much of the body is in the box without a gap, again and again.
  uint64_t run_bytes() const;
  uint64_t memory_run_bytes() const { return run_; }  // the same, without a gap in memory either
  // The dimensions over which a run of memory_run_bytes() repeats, outermost first.
  std::span<const Dim> dims() const { return dims_; }

  // Calls `emit(begin, memory, bytes)` for what lies in the body range [begin, end), in rising order: runs of
  // run_bytes(), of which the first and the last may be cut. `memory` is only right where a run is one of memory, too.
  void runs(uint64_t begin, uint64_t end, const std::function<void(uint64_t, int64_t, uint64_t)>& emit) const;

  // Calls `emit(begin, memory, bytes)` for what lies in the body range [begin, end), in rising order: runs that lie
  // together in the body and in memory, of which the first and the last may be cut.
  void runs_in_memory(uint64_t begin, uint64_t end, const std::function<void(uint64_t, int64_t, uint64_t)>& emit) const;

  // Calls `emit(begin, end)` for body ranges in rising order that cover the box; gaps of up to `gap` bytes are closed.
  void ranges(uint64_t gap, const std::function<void(uint64_t, uint64_t)>& emit) const;

  // Equal boxes give equal bytes from equal memory. The order means nothing.
  auto operator<=>(const Box&) const = default;

 private:
  template <typename Copy>
  void visit(uint64_t begin, uint64_t end, const Copy& copy) const;

  std::vector<Dim> dims_;  // outermost first; runs repeat over them
  uint64_t run_ = 0;       // bytes contiguous in both
  uint64_t bytes_ = 0, begin_ = 0, end_ = 0;
  bool whole_ = true;
};

struct BoxCopy {
  Box box;  // which elements of the piece, and how they lie in `memory`
  std::byte* piece;
  std::byte* memory;  // where the box's first element is
};

enum class CopyWay {
  scatter,  // out of the pieces
  gather,   // into them
};

// Makes all copies on up to `threads` threads. No two may write the same bytes, or read what another writes.
void copy_boxes(std::span<const BoxCopy> copies, unsigned threads, CopyWay way = CopyWay::scatter);

// Rows: dtype, address of the piece, dimensions n, n sizes of the piece, n offsets of the box in it, n sizes of the
// box, address of the box's first element, n strides (elements). Throws Error(invalid, row).
std::vector<BoxCopy> parse_copy_table(std::span<const int64_t> table);

}  // namespace vescale_ckpt::io
