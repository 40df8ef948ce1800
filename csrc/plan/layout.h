// What all ranks together hold: every key once, every distinct box once, and for each box the ranks that hold it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/large_vector.h"
#include "base/numbered_strings.h"
#include "state/inventory.h"

namespace vescale_ckpt::plan {

struct Holder {
  uint32_t rank;
  uint32_t item;  // row of that rank's inventory
};

struct Layout {
  struct Key {
    state::ItemKind kind;
    uint8_t dtype;
    uint16_t flags;
    uint32_t ndim;
    uint32_t boxes;      // how many; an object has one, without dims
    uint64_t first_box;  // among all boxes
    uint64_t shape;      // where it starts in shapes
    uint64_t dims;       // where offset[ndim], size[ndim] of its first box start in dims; the others follow
    uint64_t bytes;      // of one element; of an object the whole
  };

  NumberedStrings names;  // of keys
  std::vector<Key> keys;
  std::vector<int64_t> shapes;
  LargeVector<int64_t> dims;
  LargeVector<Holder> holders;         // of box after box, ranks ascending
  LargeVector<uint32_t> first_holder;  // of each box; one more at the end

  std::span<const int64_t> shape(const Key& key) const { return {shapes.data() + key.shape, key.ndim}; }
  // In all of these `box` counts from the key's first.
  std::span<const int64_t> offset(const Key& key, size_t box) const {
    return {dims.data() + key.dims + box * 2 * key.ndim, key.ndim};
  }
  std::span<const int64_t> size(const Key& key, size_t box) const {
    return {dims.data() + key.dims + box * 2 * key.ndim + key.ndim, key.ndim};
  }
  uint64_t bytes(const Key& key, size_t box) const {
    uint64_t product = key.bytes;
    for (const int64_t length : size(key, box)) product *= static_cast<uint64_t>(length);
    return product;
  }
  std::span<const Holder> holders_of(const Key& key, size_t box) const {
    const uint32_t* first = first_holder.data() + key.first_box + box;
    return {holders.data() + first[0], first[1] - first[0]};
  }
  std::span<Holder> holders_of(const Key& key, size_t box) {
    const uint32_t* first = first_holder.data() + key.first_box + box;
    return {holders.data() + first[0], first[1] - first[0]};
  }
};

}  // namespace vescale_ckpt::plan
