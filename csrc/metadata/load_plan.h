// Plans a load of one rank: which parts of which records it reads, and where they go in its targets.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "metadata/index.h"
#include "state/inventory.h"

namespace vescale_ckpt::metadata {

struct LoadPlan {
  struct Mismatch {
    int64_t item;
    std::string wanted, stored;  // "a tensor", "an object", "shape (2, 3)", "dtype torch.float32"
  };

  // Rows: item, file, record offset, record length, crc or -1, dtype (our code), ndim, then of ndim numbers each: the
  // chunk's size, where the overlap starts in the chunk, its size, where it starts in the wanted box. In the order of
  // files and offsets.
  std::vector<int64_t> reads;
  // Rows: item, file, record offset, record length, crc or -1. In the same order.
  std::vector<int64_t> objects;
  std::vector<std::string> files;  // names of those that are read

  std::vector<int64_t> missing;  // items whose name is not in the checkpoint
  std::vector<Mismatch> mismatched;
  std::vector<int64_t> uncovered;  // items with elements that no chunk holds, or more than one
};

// Item i is row i of `wanted`. With `allow_cast` a stored dtype may be another than the wanted one.
// Throws Error: invalid (wanted boxes that leave their tensors), corrupt, io.
LoadPlan plan_load(const Index& index, const state::Inventory& wanted, bool allow_cast);

}  // namespace vescale_ckpt::metadata
