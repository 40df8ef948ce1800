#include "hf/safetensors_file.h"

#include <algorithm>
#include <utility>

#include "base/crc32.h"
#include "base/error.h"
#include "base/memory.h"
#include "io/table.h"
#include "io/transfer.h"

namespace vescale_ckpt::hf {

std::shared_ptr<const SafetensorsFile> SafetensorsFile::open(const std::string& path, const io::EngineOptions& options,
                                                             bool verify) {
  auto opened = std::make_shared<SafetensorsFile>();
  opened->file = io::File::open(path, options.widest, options.read_cached);
  const std::string head = read_head(*opened->file);
  opened->header = SafetensorsHeader::parse(head, opened->file->size(), path, verify);
  opened->head_crc = crc32(0, head.data(), head.size());
  return opened;
}

std::string SafetensorsFile::read_head(io::File& file) {
  std::string head(std::min(file.size(), kSafetensorsLengthBytes), '\0');
  io::read_exactly(file, 0, std::as_writable_bytes(std::span(head)));
  const size_t had = head.size();
  head.resize(SafetensorsHeader::head_bytes(head, file.size(), file.path()));
  io::read_exactly(file, had, std::as_writable_bytes(std::span(head)).subspan(had));
  return head;
}

uint64_t write_safetensors(write::FileWriter& writer, const SafetensorsLayout& layout,
                           std::span<const std::byte* const> data, bool sync) {
  std::vector<write::RecordSource> sources(layout.order().size());
  for (size_t i = 0; i < sources.size(); ++i) {
    sources[i].data = data[layout.order()[i]];
    sources[i].bytes = layout.bytes()[i];
  }
  const std::string head = layout.head(writer.write_tiled(sources, layout.data_begin()));
  return writer.finish_tiled(std::as_bytes(std::span(head)), sync);
}

std::vector<read::ReadItem> parse_safetensors_table(std::span<const std::shared_ptr<const SafetensorsFile>> files,
                                                    std::span<const int64_t> table) {
  std::vector<read::ReadItem> items;
  for (io::TableCursor cursor(table); !cursor.at_end(); cursor.next_row()) {
    const uint64_t file = cursor.size(), number = cursor.size();
    if (file >= files.size() || number >= files[file]->header.tensors().size()) {
      throw Error::invalid("no such tensor in the table", cursor.row());
    }
    const SafetensorsHeader& header = files[file]->header;
    const SafetensorsHeader::Tensor& tensor = header.tensors()[number];
    std::byte* memory = cursor.address();
    const int64_t dims = cursor.take(1)[0];
    try {
      const std::vector<int64_t> shape = header.torch_shape(tensor);
      const uint32_t item_bytes = std::max(header.dtype(tensor).bits / 8, 1u);
      std::vector<int64_t> offsets(shape.size()), sizes = shape, strides(shape.size());
      if (dims >= 0) {
        if (static_cast<size_t>(dims) != shape.size())
          throw Error::invalid("a box of other dimensions than its tensor");
        for (std::vector<int64_t>* values : {&offsets, &sizes, &strides}) {
          std::ranges::copy(cursor.take(shape.size()), values->begin());
        }
      } else {
        int64_t stride = 1;  // torch_shape has seen that it does not overflow
        for (size_t dim = shape.size(); dim-- > 0; stride *= std::max<int64_t>(shape[dim], 1)) strides[dim] = stride;
      }
      items.push_back({.file = static_cast<uint32_t>(file),
                       .record_offset = tensor.begin,
                       .record_length = tensor.end - tensor.begin,
                       .dtype = 0,
                       .chunk_sizes = {},
                       .box = io::Box(item_bytes, shape, offsets, sizes, strides),
                       .memory = memory,
                       .bare = true,
                       .blocks = header.blocks(tensor)});
      if (header.has_checksums()) items.back().crc = header.crc(tensor);
    } catch (const Error& error) {
      throw Error(error.kind, error.what(), files[file]->file->path(), tensor.begin, 0, cursor.row());
    }
  }
  return items;
}

std::unique_ptr<read::ReadReport> read_safetensors(std::span<const std::shared_ptr<const SafetensorsFile>> files,
                                                   std::span<const int64_t> table, bool verify,
                                                   const io::EngineOptions& options) {
  std::vector<std::string> paths;
  for (const auto& file : files) paths.push_back(file->file->path());
  const read::OpenFile open = [files](uint32_t number) { return files[number]->file; };
  const std::vector<read::ReadItem> items = parse_safetensors_table(files, table);
  std::vector<std::span<const std::byte>> targets;
  for (const read::ReadItem& item : items) {
    if (item.box.whole()) targets.emplace_back(item.memory, item.box.bytes());
  }
  prefer_huge_pages(std::move(targets));
  return read::read_tensors(paths, open, items, verify, options);
}

}  // namespace vescale_ckpt::hf
