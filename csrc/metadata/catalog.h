// Lists what a checkpoint holds and which rank writes it: the packed form of DCP's metadata, without record locations.
//
// Keys are in the order in which ranks, from 0 on, first name them. The chunks of a key are in the order of offsets.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/large_vector.h"
#include "state/inventory.h"

namespace vescale_ckpt::metadata {

struct Catalog {
  struct Key {
    uint64_t name;  // start in `names`
    uint32_t name_bytes;
    state::ItemKind kind;
    uint8_t dtype;
    uint16_t flags;
    uint32_t ndim;
    uint64_t shape;        // start in `dims`
    uint64_t first_chunk;  // its chunks are first_chunk .. first_chunk + chunks (an object has one, without a box)
    uint64_t chunks;
  };
  struct Chunk {
    uint64_t box;     // start of offset[ndim], size[ndim] in `dims`
    uint32_t writer;  // rank
    uint32_t row;     // index in the local plan of that rank
  };

  std::string names;
  LargeVector<int64_t> dims;
  std::vector<Key> keys;
  LargeVector<Chunk> chunks;
  uint32_t ranks = 0;

  std::string_view name(const Key& key) const { return {names.data() + key.name, key.name_bytes}; }
  std::span<const int64_t> shape(const Key& key) const { return {dims.data() + key.shape, key.ndim}; }
  // Returns the chunks of keys first .. end.
  std::span<const Chunk> chunks_of(size_t first, size_t end) const {
    if (first == end) return {};
    const uint64_t begin = keys[first].first_chunk;
    return {chunks.data() + begin, keys[end - 1].first_chunk + keys[end - 1].chunks - begin};
  }
  std::span<const int64_t> offset(const Key& key, const Chunk& chunk) const {
    return {dims.data() + chunk.box, key.ndim};
  }
  std::span<const int64_t> size(const Key& key, const Chunk& chunk) const {
    return {dims.data() + chunk.box + key.ndim, key.ndim};
  }
};

}  // namespace vescale_ckpt::metadata
