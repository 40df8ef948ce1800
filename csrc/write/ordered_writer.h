// Writes all of some files, each in order from its first byte on, as an object store takes them: what this rank holds
// straight from its memory, and what others hold piece by piece as it comes.
//
// One thread calls an OrderedWriter, which runs workers of its own. Other threads may call progress() and cancel().
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "write/placed_boxes.h"

namespace vescale_ckpt::write {

class OrderedWriter {
 public:
  struct Target {
    std::string path;  // in a remote store
    uint32_t number;   // names the file in tables of boxes
    uint64_t length;
    std::string head;  // what it begins with
  };

  // `targets`: in rising order of numbers, which are below `files`. `own`: boxes, as PlacedBoxes takes them; their
  // memory is read until finish() returns.
  OrderedWriter(std::vector<Target> targets, std::span<const int64_t> own, size_t files,
                const io::EngineOptions& options);
  // Aborts what is not complete.
  ~OrderedWriter();
  OrderedWriter(const OrderedWriter&) = delete;
  OrderedWriter& operator=(const OrderedWriter&) = delete;

  // Writes boxes that follow those of the last call, and what this rank has before them. Throws Error: io, full,
  // cancelled, or invalid if a byte before them is in no box.
  void write(std::span<const int64_t> boxes);
  // Writes what is left and completes the files. Returns what the boxes contribute to the checksums of blocks, as
  // PlacedBoxes::take_checksums.
  std::vector<uint32_t> finish();

  // From any thread, at any time. After cancel() write() and finish() throw Error(cancelled).
  void cancel();
  uint64_t progress() const { return stats_.bytes(); }
  uint64_t file_bytes() const { return file_bytes_; }  // sum over complete files
  const io::TransferStats& stats() const { return stats_; }
  // The files of which bytes were sent.
  std::vector<uint32_t> begun() const;

 private:
  void write_until(std::span<const PlacedBox> boxes, bool to_the_end);
  void begin_file();
  void write_in_order(std::span<const PlacedBox> boxes);
  void complete_file();

  const io::EngineOptions options_;
  const std::vector<Target> targets_;
  const size_t files_;
  PlacedBoxes own_;
  size_t next_own_ = 0;  // in own_: the first that is not written
  size_t next_ = 0;      // in targets_: the file that is written
  uint64_t cursor_ = 0;  // in that file
  uint64_t file_bytes_ = 0;
  std::vector<uint32_t> checksums_;
  io::TransferStats stats_;
  io::TransferControl control_;
  std::mutex mutex_;  // guards file_, which other threads cancel
  std::unique_ptr<io::File> file_;
};

}  // namespace vescale_ckpt::write
