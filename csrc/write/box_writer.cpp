#include "write/box_writer.h"

#include <utility>

namespace vescale_ckpt::write {

BoxWriter::BoxWriter(std::vector<std::string> paths, const io::EngineOptions& options)
    : options_(usable_for_writing(options)),
      paths_(std::move(paths)),
      files_(paths_.size()),
      control_(paths_.empty() ? std::string() : paths_.front(), options.bytes_per_second) {}

void BoxWriter::write(std::span<const int64_t> table) {
  PlacedBoxes boxes(table, paths_.size());
  std::vector<PlacedTensor> sources;
  sources.reserve(boxes.boxes().size());
  for (const PlacedBox& box : boxes.boxes()) {
    std::unique_ptr<io::File>& file = files_[box.file];
    if (!file) file = io::File::open_shared(paths_[box.file], options_.widest);
    sources.push_back(box.source);
    sources.back().place.file = file.get();
  }
  write_ranges(sources, Edges::shared, options_, control_, stats_);
  const std::vector<uint32_t> added = boxes.take_checksums();
  checksums_.insert(checksums_.end(), added.begin(), added.end());
}

std::vector<uint32_t> BoxWriter::finish(bool sync) {
  control_.check();
  for (std::unique_ptr<io::File>& file : files_) {
    if (file && sync) file->sync();
    if (file) file->close();
    file.reset();
  }
  control_.check();  // syncing may have taken long
  return std::move(checksums_);
}

}  // namespace vescale_ckpt::write
