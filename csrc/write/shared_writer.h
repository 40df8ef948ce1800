// Writes one rank's boxes of tensors to files that several ranks fill, each box at its final offset. The files exist in
// their final length; the coordinator writes their headers.
//
// Ranks of one node may put ranges of the files together in memory that they share: with join(), write() leaves these
// ranges out. In each round every rank copies its bytes of all ranges of the round into the writers' windows (fill),
// and then, when all have, each writer sends its own window (send). So a range is written in one piece whatever the
// boxes.
//
// Files of a remote store take bytes in order, from one writer. There the ranges are all of the files, and nothing is
// written here: whoever calls fill() gives the windows to files of its own. Such a file begins with the checksums of
// its tensors, so these are taken beforehand (sum), and once more of what the windows hold (sum_window).
//
// One thread calls a SharedWriter, which runs workers of its own. Other threads may call progress() and cancel(); and
// one may be in fill() while another is in send().
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
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

  // `table`: of memory, as for FileWriter::write (write/write_table.h); `rows`: which target each row of it is written
  // to. Throws Error: io, full, cancelled, or invalid with the row of the table, also for bytes of a remote file that
  // are in no range.
  void write(std::span<const int64_t> table, std::span<const int64_t> rows);

  // `ranges`: what the ranks of the node put together: rows of file, begin, end, writer, round, offset in the writer's
  // window of the round. Blocks of a file are in them whole or not at all. `writer`: which of them this one is. The
  // targets of its ranges follow those of its boxes, from `first_target` on: bytes of a tensor, seen as one dimension.
  // Call it before write(), at most once. Throws Error(invalid, row).
  void join(std::span<const int64_t> ranges, uint32_t writer, uint64_t window_bytes, size_t first_target);
  // Copies what write() was given, and left out, into the windows of the round, one of each writer, of `window_bytes`.
  // What belongs into a window that is null is left out.
  // The memory given to write() must not have changed.
  void fill(uint64_t round, std::span<std::byte* const> windows) const;
  // Writes this writer's window of the round. Throws as write() does.
  void send(uint64_t round, const std::byte* window);

  // For remote files: what the boxes that write() was given contribute to the checksums of blocks, as finish() returns
  // it. The memory given to write() must not have changed.
  std::vector<uint32_t> sum();
  // Adds what the window of this writer holds to what finish() returns, instead of send().
  void sum_window(uint64_t round, const std::byte* window);

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
  struct Range {
    uint32_t file;
    uint64_t begin, end;
    uint64_t writer, round, at;
    std::pair<uint32_t, uint64_t> place() const { return {file, begin}; }
  };
  struct Held {  // a box that write() was given
    TileSource source;
    uint32_t file;
    uint64_t begin() const { return source.place.begin + source.box->begin(); }  // in the file
    uint64_t end() const { return source.place.begin + source.box->end(); }
  };
  // A part of a target that this writer sends, and the range that it is in.
  struct Sent {
    size_t target;
    const Range* range;
  };
  io::File* opened(uint32_t file);
  TensorPlace place_of(const Target& target, const io::Box& box, io::File* file);
  static io::Box box_of(const Target& target);  // of one that is a part of a range
  // The ranges that have bytes of [begin, end) of the file, in rising order.
  std::span<const Range> ranges_in(uint32_t file, uint64_t begin, uint64_t end) const;
  void write_all(std::vector<TileSource>& sources);
  // Calls `body(number)` for all numbers below `count`, by several threads.
  void in_parallel(size_t count, const std::function<void(size_t)>& body) const;

  const io::EngineOptions options_;
  const std::vector<std::string> paths_;
  const std::vector<int64_t> table_;
  std::vector<Target> targets_;
  std::vector<std::unique_ptr<io::File>> files_;
  std::vector<uint32_t> blocks_;
  std::vector<Range> ranges_;  // in the order of the files
  uint64_t writers_ = 0;
  std::vector<std::vector<Sent>> sent_;  // by round
  std::deque<io::Box> boxes_;            // of held_
  std::vector<Held> held_;               // has bytes in ranges_
  const bool remote_;
  io::TransferStats stats_;
  io::TransferControl control_;
};

}  // namespace vescale_ckpt::write
