// Translates a rank's local plan into the engine's tables, which say where in memory each row of it lies.
//
// All tables are rows of 64-bit integers, one behind another. Those that describe a state, beside its inventory:
//   tensors:  address, dtype or -1, device or -1, dimensions n, n sizes, n strides (elements)
//             the local tensors; a device is DLPack's code and, times 2^32, its number; -1 for a tensor without memory
//   sources:  tensor, dimensions n, n offsets
//             for each item of the inventory, the local tensor that its box lies in, and where; an object: -1, 0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "state/inventory.h"

namespace vescale_ckpt::state {

constexpr int64_t kHostDevice = 1, kCudaDevice = 2;  // DLPack's codes

// What the engine may do with a tensor, one byte each; from kOnDevice on: a snapshot may copy it from device (byte -
// 2).
constexpr uint8_t kNotReady = 0, kOnHost = 1, kOnDevice = 2;  // kOnHost: all that it does with memory

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

// The numbers of tensors whose elements do not lie one behind another, or of which that is not known: they have no
// plain memory.
std::vector<size_t> not_contiguous(const TensorTable& tensors);

// Whether a tensor is in host memory or, `with_cuda`, in that of a CUDA device.
bool has_memory(const LocalTensor& tensor, bool with_cuda);

// A byte a tensor: kOnHost or kOnDevice + number if its lazy operations are done and its storage has memory to its end.
// Three numbers are given for each tensor that `has_memory`, in the order of the table; other tensors are not ready.
// Throws Error (invalid) if they are not so many.
std::vector<uint8_t> ready_tensors(const TensorTable& tensors, bool with_cuda, std::span<const std::byte> lazy,
                                   std::span<const int64_t> storage_offsets,  // elements
                                   std::span<const int64_t> storage_bytes);

// A state as the engine's tables need it. `ready`: of ready_tensors.
struct StateTables {
  // Throws Error (invalid) if they do not belong together.
  StateTables(const Inventory& inventory, std::span<const int64_t> sources, std::span<const int64_t> tensors,
              std::span<const std::byte> ready);

  const Inventory& inventory;
  TensorTable tensors;
  std::vector<std::span<const int64_t>> sources;  // row of each item
  std::span<const std::byte> ready;
};

// The engine's write table (write/write_table.h) for rows of a local plan: item, dim, start, length, where dim -1
// stands for the whole box and any other for `length` indices of it along dim. Objects have no row. Throws Error
// (invalid, row of the part) for what is not in memory or leaves its tensor.
std::vector<int64_t> make_write_table(const StateTables& state, std::span<const int64_t> local_plan);

// The same for a snapshot (stage/snapshot.h), of tensors in host memory and on devices, and for each row -1 or its
// device.
struct CopyTable {
  std::vector<int64_t> rows, devices;
};
CopyTable make_copy_table(const StateTables& state, std::span<const int64_t> local_plan);

// For each row of a local plan, without objects: what ready_tensors says of the tensor that it lies in.
std::vector<uint8_t> ready_rows(const StateTables& state, std::span<const int64_t> local_plan);

// The engine's read table for rows: item, file, record offset, record length, CRC-32 or -1, stored dtype, dimensions n,
// n chunk sizes, n offsets in the chunk, n lengths, n offsets in the item's box. Throws as above; what concerns the
// chunk is left to the engine to check.
struct FillTable {
  CopyTable copies;           // the engine's table, and the device of each row
  std::vector<int64_t> rest;  // numbers of rows that the engine cannot fill, or not fast: on a device, in short runs
};
FillTable make_read_table(const StateTables& state, std::span<const int64_t> reads);

// The address of a contiguous piece at an offset in the memory. Throws Error (invalid, row) if it leaves the memory.
int64_t address_in(std::span<const std::byte> memory, int64_t offset, int64_t dtype, std::span<const int64_t> sizes,
                   int64_t row);

// The engine's copy table (io/box_copy.h) for RouteRound::places (share/routes.h), given the memories that they are in:
// rows of peer (-1: this rank), address, bytes. The rest: also rows whose tensor is not of the stored dtype. Throws as
// above, also for rows that leave a memory.
FillTable make_place_table(const StateTables& state, std::span<const int64_t> places,
                           std::span<const int64_t> memories);

}  // namespace vescale_ckpt::state
