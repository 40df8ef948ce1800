// Catalogs made by hand, with what ranks would have written.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/crc32.h"
#include "metadata/catalog.h"
#include "metadata/index.h"
#include "metadata/index_format.h"
#include "metadata/index_image.h"
#include "metadata/key_paths.h"
#include "metadata/metadata_pickle.h"
#include "metadata/record_locations.h"
#include "state/inventory.h"
#include "tensors.h"

namespace vescale_ckpt::metadata {

using Dims = std::vector<int64_t>;

struct BoxOf {
  Dims offset, size;
  bool operator==(const BoxOf&) const = default;
};

// A tensor cut into so many parts along each dimension, in the order of the offsets.
inline std::vector<BoxOf> grid(const Dims& shape, const Dims& parts) {
  std::vector<BoxOf> boxes{{{}, {}}};
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    std::vector<BoxOf> longer;
    for (const BoxOf& box : boxes) {
      for (int64_t i = 0; i < parts[dim]; ++i) {
        const int64_t begin = shape[dim] * i / parts[dim], end = shape[dim] * (i + 1) / parts[dim];
        longer.push_back(box);
        longer.back().offset.push_back(begin);
        longer.back().size.push_back(end - begin);
      }
    }
    boxes = std::move(longer);
  }
  return boxes;
}

// Chunk i of a key is written by rank i % ranks; its record lies at 1000 times its row, 100 + row bytes long, with the
// CRC 0xC0000000 + row.
class Checkpoint {
 public:
  explicit Checkpoint(uint32_t ranks = 2) : tables_(ranks) {
    catalog.ranks = ranks;
    for (uint32_t rank = 0; rank < ranks; ++rank) files.push_back({"__" + std::to_string(rank) + "_0.distcp"});
  }

  Checkpoint& object(std::string_view name) {
    add(name, state::ItemKind::object, 0, {}, 1);
    put({}, 0);
    return *this;
  }

  Checkpoint& tensor(std::string_view name, const Dims& shape, const std::vector<BoxOf>& boxes,
                     std::string_view dtype = "float32", uint16_t flags = 0) {
    add(name, boxes.size() == 1 ? state::ItemKind::tensor : state::ItemKind::shard, flags, shape, boxes.size());
    catalog.keys.back().dtype = static_cast<uint8_t>(dtype_code(dtype));
    for (size_t i = 0; i < boxes.size(); ++i) put(boxes[i], i);
    return *this;
  }

  Checkpoint& tensor(std::string_view name, const Dims& shape, std::string_view dtype = "float32") {
    return tensor(name, shape, grid(shape, Dims(shape.size(), 1)), dtype);
  }

  RecordLocations locations() const {
    std::vector<std::span<const int64_t>> tables(tables_.begin(), tables_.end());
    return RecordLocations(std::move(tables), files);
  }

  std::vector<std::byte> image(std::string_view save_id = "save", uint64_t bytes = 1 << 20, uint32_t crc = 2) const {
    const RecordLocations where = locations();
    const IndexImage image(catalog, where, save_id);
    std::vector<std::byte> content(image.bytes());
    image.write(content.data(), bytes, crc);
    return content;
  }

  // The content of `.metadata`.
  std::string metadata(const std::vector<std::span<const std::byte>>& paths = {}, unsigned threads = 2) const {
    const RecordLocations where = locations();
    const KeyPaths merged(paths);
    const MetadataContent content{catalog, where, merged, "/a/path", "save"};
    std::vector<std::byte> bytes(most_metadata_bytes(content));
    const WrittenMetadata written =
        write_metadata(content, threads, [&](uint64_t offset, std::span<const std::byte> block) {
          ASSERT_LE(offset + block.size(), bytes.size());
          std::ranges::copy(block, bytes.begin() + static_cast<ptrdiff_t>(offset));
        });
    return {reinterpret_cast<const char*>(bytes.data()), written.bytes};
  }

  Catalog catalog;
  std::vector<std::vector<std::string>> files;
  std::vector<std::vector<int64_t>>& tables() { return tables_; }

 private:
  void add(std::string_view name, state::ItemKind kind, uint16_t flags, const Dims& shape, uint64_t chunks) {
    catalog.keys.push_back({catalog.names.size(), static_cast<uint32_t>(name.size()), kind, 0, flags,
                            static_cast<uint32_t>(shape.size()), catalog.dims.size(), catalog.chunks.size(), chunks});
    catalog.names += name;
    catalog.dims.insert(catalog.dims.end(), shape.begin(), shape.end());
  }

  void put(const BoxOf& box, size_t number) {
    const auto rank = static_cast<uint32_t>(number % tables_.size());
    const auto row = static_cast<uint32_t>(tables_[rank].size() / RecordLocations::kWords);
    catalog.chunks.push_back({catalog.dims.size(), rank, row});
    catalog.dims.insert(catalog.dims.end(), box.offset.begin(), box.offset.end());
    catalog.dims.insert(catalog.dims.end(), box.size.begin(), box.size.end());
    tables_[rank].insert(tables_[rank].end(), {0, 1000 * int64_t{row}, 100 + int64_t{row}, 0xC0000000 + int64_t{row}});
  }

  std::vector<std::vector<int64_t>> tables_;  // by rank
};

// What a rank wants, or what a checkpoint holds, as packed rows.
class ItemRows {
 public:
  ItemRows& object(std::string_view name) {
    state::Item item;
    item.name = name;
    builder_.add(item);
    return *this;
  }

  ItemRows& box(std::string_view name, const Dims& shape, const BoxOf& box, std::string_view dtype = "float32") {
    state::Item item;
    item.name = name;
    item.kind = state::ItemKind::shard;
    item.dtype = static_cast<uint8_t>(dtype_code(dtype));
    item.shape = shape;
    item.offset = box.offset;
    item.size = box.size;
    builder_.add(item);
    return *this;
  }

  std::vector<std::byte> pack() const { return builder_.pack(); }

 private:
  state::InventoryBuilder builder_;
};

// Makes the checksum of an index that of what it holds.
inline void seal(std::vector<std::byte>& image) {
  const uint32_t crc = crc32(0, image.data(), image.size() - sizeof crc);
  std::memcpy(image.data() + image.size() - sizeof crc, &crc, sizeof crc);
}

}  // namespace vescale_ckpt::metadata
