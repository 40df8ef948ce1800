// From a rank's part of a plan to the engine's tables: where in memory each row of it lies.
//
// All tables are rows of 64-bit integers, one behind another. Those that describe a state, beside its inventory:
//   tensors:  address, dtype or -1, device or -1, dimensions n, n sizes, n strides (elements)
//             the local tensors; a device is DLPack's code; -1 where there is no memory to be had
//   sources:  tensor, dimensions n, n offsets
//             for each item of the inventory, the local tensor that its box lies in, and where; an object: -1, 0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "plan/inventory.h"

namespace vescale_ckpt {

constexpr int64_t kHostDevice = 1;  // DLPack's code

struct LocalTensor {
  int64_t address;
  int64_t dtype;
  int64_t device;
  std::span<const int64_t> shape, strides;
};

// A view of a table of tensors: the words must outlive it.
class TensorTable {
 public:
  // Checks every length in it. Throws Error (invalid).
  explicit TensorTable(std::span<const int64_t> words);

  size_t size() const { return rows_.size(); }
  LocalTensor operator[](size_t index) const;

 private:
  std::span<const int64_t> words_;
  std::vector<size_t> rows_;  // where each row starts
};

// Whether two tables hold tensors of the same dtypes and shapes, wherever those are.
bool same_shapes(const TensorTable& left, const TensorTable& right);

// For each tensor in host memory, in order: whether its lazy operations are done and its storage reaches to its end.
// A byte a row, 0 for tensors elsewhere. Throws Error (invalid) if the three are not one entry a tensor in host memory.
std::vector<std::byte> ready_tensors(const TensorTable& tensors, std::span<const std::byte> lazy,
                                     std::span<const int64_t> storage_offsets,  // elements
                                     std::span<const int64_t> storage_bytes);

// A state as the engine's tables need it. `ready` has a byte a tensor: whether the engine may use its memory.
struct StateTables {
  // Throws Error (invalid) if they do not belong together.
  StateTables(const Inventory& inventory, std::span<const int64_t> sources, std::span<const int64_t> tensors,
              std::span<const std::byte> ready);

  const Inventory& inventory;
  TensorTable tensors;
  std::vector<std::span<const int64_t>> sources;  // row of each item
  std::span<const std::byte> ready;
};

// The engine's write table (io/table.h) for rows of a part: item, dim, start, length, where dim -1 stands for the whole
// box and any other for `length` indices of it along dim. Objects have no row. Throws Error (invalid, row of the part)
// for what is not in memory or leaves its tensor.
std::vector<int64_t> make_write_table(const StateTables& state, std::span<const int64_t> part);

// The engine's read table for rows: item, file, record offset, record length, CRC-32 or -1, stored dtype, dimensions n,
// n chunk sizes, n offsets in the chunk, n lengths, n offsets in the item's box. Throws as above; what concerns the
// chunk is left to the engine to check.
std::vector<int64_t> make_read_table(const StateTables& state, std::span<const int64_t> reads);

}  // namespace vescale_ckpt
