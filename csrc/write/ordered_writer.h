// Writes whole files sequentially, as object stores require: local boxes straight from memory, boxes of other ranks as
// they arrive.
//
// An OrderedWriter is used by one thread and runs its own workers. Other threads may call progress() and cancel().
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
    uint32_t number;   // of the file, in tables of boxes
    uint64_t length;
    std::string head;  // its first bytes
  };

  // `targets`: by ascending number, each less than `files`. `own`: the local boxes, as PlacedBoxes takes them, whose
  // memory must stay valid until finish() returns.
  OrderedWriter(std::vector<Target> targets, std::span<const int64_t> own, size_t files,
                const io::EngineOptions& options);
  // Aborts an incomplete file.
  ~OrderedWriter();
  OrderedWriter(const OrderedWriter&) = delete;
  OrderedWriter& operator=(const OrderedWriter&) = delete;

  // Writes boxes, which must follow those of the previous call, and the local boxes that precede them. Throws Error:
  // io, full, cancelled, or invalid if a byte before them is in no box.
  void write(std::span<const int64_t> boxes);
  // Writes the remaining local boxes and completes the files. Returns the checksum contributions of all boxes, as
  // PlacedBoxes::take_checksums.
  std::vector<uint32_t> finish();

  // From any thread, at any time. After cancel(), write() and finish() throw Error(cancelled).
  void cancel();
  uint64_t progress() const { return stats_.bytes(); }
  uint64_t file_bytes() const { return file_bytes_; }  // sum over complete files
  const io::TransferStats& stats() const { return stats_; }
  // The numbers of the files that were started.
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
  size_t next_own_ = 0;  // index in own_ of the first unwritten box
  size_t next_ = 0;      // index in targets_ of the current file
  uint64_t cursor_ = 0;  // offset in that file
  uint64_t file_bytes_ = 0;
  std::vector<uint32_t> checksums_;
  io::TransferStats stats_;
  io::TransferControl control_;
  std::mutex mutex_;  // guards file_, which other threads cancel
  std::unique_ptr<io::File> file_;
};

}  // namespace vescale_ckpt::write
