// Writes one rank's boxes of tensors to files that several ranks fill, each box at its final offset. The files exist in
// their final length; the coordinator writes their headers.
//
// One thread calls a BoxWriter, which runs workers of its own. Other threads may call progress() and cancel().
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "write/placed_boxes.h"

namespace vescale_ckpt::write {

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
