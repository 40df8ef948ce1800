#include "write/placed_boxes.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "base/error.h"
#include "io/table_cursor.h"

namespace vescale_ckpt::write {

PlacedBoxes::PlacedBoxes(std::span<const int64_t> table, size_t files) {
  std::vector<size_t> first;  // for each box, the index of its words in checksums_
  for (io::TableCursor cursor(table); !cursor.at_end(); cursor.next_row()) {
    const uint64_t file = cursor.size(), begin = cursor.size(), bytes = cursor.size();
    cursor.take(1);
    const uint32_t dtype = cursor.dtype();
    const uint64_t dims = cursor.size();
    const auto sizes = cursor.take(dims), offsets = cursor.take(dims), lengths = cursor.take(dims);
    const std::byte* data = cursor.address();
    const auto strides = cursor.take(dims);
    cursor.made_of_row([&] {
      const format::DType& of = format::dtypes()[dtype];
      uint64_t end = 0;
      if (file >= files) throw Error::invalid("no such file");
      if (format::tensor_bytes(of, sizes) != bytes || __builtin_add_overflow(begin, bytes, &end)) {
        throw Error::invalid("a tensor's place is not of its size");
      }
      io::Box box(of.item_bytes, sizes, offsets, lengths, strides);
      if (box.bytes() == 0) return 0;
      const io::Box& kept = of_memory_.emplace_back(std::move(box));
      const uint64_t from = begin + kept.begin(), to = begin + kept.end();
      const uint64_t cell = from / format::kChecksumBlock, cells = format::cells(from, to);
      boxes_.push_back({static_cast<uint32_t>(file), {{nullptr, begin, end, cell, {}}, data, &kept}});
      const uint64_t first_cell = cell - begin / format::kChecksumBlock, in_box = kept.bytes();
      for (const uint64_t word :
           {file, begin & UINT32_MAX, begin >> 32, in_box & UINT32_MAX, in_box >> 32, first_cell, cells}) {
        checksums_.push_back(static_cast<uint32_t>(word));
      }
      first.push_back(checksums_.size());
      checksums_.resize(checksums_.size() + cells);
      return 0;
    });
  }
  for (size_t number = 0; number < boxes_.size(); ++number) {
    boxes_[number].source.place.blocks = std::span(checksums_).subspan(first[number], checksums_[first[number] - 1]);
  }
  std::ranges::stable_sort(boxes_, {}, [](const PlacedBox& box) { return std::pair(box.file, box.begin()); });
}

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
  control_.check();  // the sync may have taken long
  return std::move(checksums_);
}

}  // namespace vescale_ckpt::write
