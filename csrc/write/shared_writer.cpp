#include "write/shared_writer.h"

#include <algorithm>
#include <deque>
#include <utility>

#include "base/error.h"
#include "io/table.h"
#include "write/writer.h"

namespace vescale_ckpt::write {

SharedWriter::SharedWriter(std::vector<std::string> paths, std::span<const int64_t> targets,
                           const io::EngineOptions& options)
    : options_(usable_for_writing(options)),
      paths_(std::move(paths)),
      table_(targets.begin(), targets.end()),
      files_(paths_.size()),
      control_(paths_.empty() ? std::string() : paths_.front(), options.bytes_per_second) {
  uint64_t blocks = 0;
  for (io::TableCursor cursor(table_); !cursor.at_end(); cursor.next_row()) {
    const uint64_t file = cursor.size(), begin = cursor.size();
    const uint32_t dtype = cursor.dtype();
    const uint64_t dims = cursor.size();
    if (file >= paths_.size() || dims > table_.size()) throw Error::invalid("no such file in the table", cursor.row());
    Target target{static_cast<uint32_t>(file), dtype, begin, 0, blocks, cursor.take(3 * dims)};
    blocks += cursor.made_of_row([&] {
      const uint64_t bytes = format::tensor_bytes(format::dtypes()[dtype], target.sizes(0));
      if (__builtin_add_overflow(begin, bytes, &target.end)) throw Error::invalid("a tensor's place overflows");
      const std::vector<int64_t> strides(dims);
      const io::Box box(format::dtypes()[dtype].item_bytes, target.sizes(0), target.sizes(1), target.sizes(2), strides);
      return format::cells(begin + box.begin(), begin + box.end());
    });
    targets_.push_back(target);
  }
  blocks_.resize(blocks);
}

io::File* SharedWriter::opened(uint32_t file) {
  if (!files_[file]) files_[file] = io::File::open_shared(paths_[file], options_.widest);
  return files_[file].get();
}

void SharedWriter::write(std::span<const int64_t> table, std::span<const int64_t> rows) {
  std::deque<io::Box> boxes;
  std::vector<TileSource> sources;
  sources.reserve(rows.size());
  io::TableCursor cursor(table);
  for (; !cursor.at_end(); cursor.next_row()) {
    const uint32_t dtype = cursor.dtype();
    const std::byte* data = cursor.address();
    const uint64_t dims = cursor.size();
    const auto sizes = cursor.take(dims), strides = cursor.take(dims);
    const auto at = static_cast<size_t>(cursor.row());
    if (at >= rows.size() || rows[at] < 0 || static_cast<uint64_t>(rows[at]) >= targets_.size()) {
      throw Error::invalid("no such box in the layout", cursor.row());
    }
    const Target& target = targets_[static_cast<size_t>(rows[at])];
    if (dtype != target.dtype || !std::ranges::equal(sizes, target.sizes(2))) {
      throw Error::invalid("a tensor is not what the layout was made for", cursor.row());
    }
    const io::Box& box =
        boxes.emplace_back(format::dtypes()[dtype].item_bytes, target.sizes(0), target.sizes(1), sizes, strides);
    if (box.bytes() == 0) continue;
    const uint64_t begin = target.begin + box.begin(), end = target.begin + box.end();
    const TensorPlace place{opened(target.file), target.begin, target.end, begin / format::kChecksumBlock,
                            std::span(blocks_).subspan(target.first_block, format::cells(begin, end))};
    sources.push_back({place, data, &box});
  }
  if (static_cast<size_t>(cursor.row()) != rows.size()) throw Error::invalid("as many boxes as tensors are wanted");
  const auto place = [](const TileSource& source) {
    return std::pair(source.place.file, source.place.begin + source.box->begin());
  };
  std::ranges::sort(sources, {}, place);
  write_tiles(sources, TileEdges::shared, options_, control_, stats_);
}

std::span<const uint32_t> SharedWriter::finish(bool sync) {
  control_.check();
  for (std::unique_ptr<io::File>& file : files_) {
    if (file && sync) file->sync();
    if (file) file->close();
    file.reset();
  }
  control_.check();  // syncing may have taken long
  return blocks_;
}

}  // namespace vescale_ckpt::write
