// Plans a load of one rank: which parts of which records it reads, and where in its targets it puts them.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "metadata/index.h"
#include "state/inventory.h"

namespace vescale_ckpt::metadata {

struct LoadPlan {
  struct Mismatch {
    int64_t item;
    std::string expected, stored;  // "a tensor", "an object", "shape (2, 3)", "dtype torch.float32"
  };

  // Each row has: item, file, record offset, record length, crc or -1, dtype code, ndim, then four lists of ndim
  // numbers: the chunk's size, the start of the overlap in the chunk, its size, its start in the item's box. Rows are
  // in the order of files and offsets.
  std::vector<int64_t> reads;
  // Each row has: item, file, record offset, record length, crc or -1. Rows are in the same order.
  std::vector<int64_t> objects;
  std::vector<std::string> files;  // names of the files that are read

  std::vector<int64_t> missing;  // items whose name is not in the checkpoint
  std::vector<Mismatch> mismatched;
  std::vector<int64_t> uncovered;  // items with elements that are in no chunk, or in more than one
};

// `targets` are the items to fill. With `allow_cast` the stored dtype may differ from the target's.
// Throws Error: invalid (a target's box leaves its tensor), corrupt, io.
LoadPlan plan_load(const Index& index, const state::Inventory& targets, bool allow_cast);

// Tensors and objects of an index, each as a whole, for loads into new tensors.
struct WholeItems {
  std::vector<Index::Key> keys;
  std::vector<std::byte> inventory;
  std::vector<int64_t> sources;  // state/tables.h
};

// `selected`: numbers of keys. Throws Error: corrupt; invalid, with the position in `selected`, for a tensor that is
// larger than its records, or of an unknown dtype.
WholeItems whole_items(const Index& index, std::span<const uint64_t> selected);

}  // namespace vescale_ckpt::metadata
