// Lists what all ranks together hold: every key once, every distinct chunk once, and the ranks that hold each chunk.
//
// Layers repeat: if every rank has equal rows for several keys, these keys are one class, and their rows are kept once.
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
  uint32_t slot;  // slot of that rank's block
};

struct Layout {
  struct Class {
    state::ItemKind kind;
    uint8_t dtype;
    uint16_t flags;
    uint32_t ndim;
    uint32_t first_key;
    uint32_t keys;         // number of keys
    uint32_t chunks;       // number of chunks; an object has one, without dims
    uint64_t first_chunk;  // index among all chunks
    uint64_t shape;        // start in `shapes`
    uint64_t dims;         // start of offset[ndim], size[ndim] of its first chunk in `dims`; the others follow
    uint64_t bytes;        // bytes of one element; 0 of an object
  };

  // Ranks with the same keys in the same order, and with equal rows for the same keys, as the ranks of a mesh.
  // A slot is one item under each key of a class. If ranks hold several chunks of a key, the class has several slots.
  struct Block {
    uint32_t names;                         // index into key_lists
    uint32_t ranks = 0;                     // number of ranks
    std::vector<uint32_t> slots = {};       // slot of each item
    std::vector<uint32_t> slot_items = {};  // item of each slot under the first key of its class
  };

  NumberedStrings names;                         // names of keys
  std::vector<uint32_t> class_of;                // class of each key
  std::vector<Class> classes;                    // sorted by their first keys
  std::vector<std::vector<uint32_t>> key_lists;  // the key of each item, once for all ranks with equal names
  std::vector<Block> blocks;
  std::vector<uint32_t> block_of;  // block of each rank
  std::vector<int64_t> shapes;
  LargeVector<int64_t> dims;
  LargeVector<Holder> holders;         // holders of chunk after chunk, ranks ascending
  LargeVector<uint32_t> first_holder;  // first holder of each chunk, and the end

  const Block& block(size_t rank) const { return blocks[block_of[rank]]; }
  const std::vector<uint32_t>& keys(const Block& block) const { return key_lists[block.names]; }

  std::span<const int64_t> shape(const Class& of) const { return {shapes.data() + of.shape, of.ndim}; }
  // In all of these, `chunk` counts from the class's first chunk.
  std::span<const int64_t> offset(const Class& of, size_t chunk) const {
    return {dims.data() + of.dims + chunk * 2 * of.ndim, of.ndim};
  }
  std::span<const int64_t> size(const Class& of, size_t chunk) const {
    return {dims.data() + of.dims + chunk * 2 * of.ndim + of.ndim, of.ndim};
  }
  uint64_t bytes(const Class& of, size_t chunk) const {
    uint64_t product = of.bytes;
    for (const int64_t length : size(of, chunk)) product *= static_cast<uint64_t>(length);
    return product;
  }
  std::span<const Holder> holders_of(const Class& of, size_t chunk) const {
    const uint32_t* first = first_holder.data() + of.first_chunk + chunk;
    return {holders.data() + first[0], first[1] - first[0]};
  }
  std::span<Holder> holders_of(const Class& of, size_t chunk) {
    const uint32_t* first = first_holder.data() + of.first_chunk + chunk;
    return {holders.data() + first[0], first[1] - first[0]};
  }
};

// Merges the inventories of all ranks: numbers their keys, finds equal chunks, and checks that the ranks agree. Throws
// Error (invalid) with the key and the ranks unless all ranks have the same kind, dtype and shape under each key, and
// chunks lie within the shape, are equal or disjoint, and cover it. The only rank of a job may hold any part of the
// shape. The error is about the first wrong key. Leaves out empty chunks, unless a tensor has no other.
Layout merge(std::span<const state::Inventory> ranks, unsigned threads);

// The first step of it: fills in the keys, classes and blocks of a layout: names, class_of, classes without chunks,
// shapes, key_lists, blocks, block_of. The traits of a class come from the first rank that has it.
void find_classes(std::span<const state::Inventory> ranks, Layout& layout);

}  // namespace vescale_ckpt::plan
