// Describes where a state's tensors are, and translates a rank's local plan into the engine's tables, which have the
// memory address of each row.
//
// All tables are rows of 64-bit integers. These describe a state, together with its inventory:
//   tensors:  address, dtype or -1, device or -1, dimensions n, n sizes, n strides (elements)
//             a row for each local tensor; a device is DLPack's code plus its number times 2^32; -1: no memory
//   sources:  tensor, dimensions n, n offsets
//             a row for each item of the inventory: the local tensor of its chunk, and the offset in it; an object: -1,
//             0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "state/inventory.h"

namespace vescale_ckpt::state {

constexpr int64_t kHostDevice = 1, kCudaDevice = 2;  // DLPack's codes

// A flag for each tensor, one byte. kOnHost: the engine may use its memory in any way. kOnDevice + i: a snapshot may
// copy it from device i.
constexpr uint8_t kNotReady = 0, kOnHost = 1, kOnDevice = 2;

inline void append(std::vector<int64_t>& row, std::span<const int64_t> words) {
  row.insert(row.end(), words.begin(), words.end());
}

struct LocalTensor {
  int64_t address;
  int64_t dtype;
  int64_t device;
  std::span<const int64_t> shape, strides;
};

// A view of a table of tensors. The words must outlive it.
class TensorTable {
 public:
  // Checks every length. Throws Error (invalid).
  explicit TensorTable(std::span<const int64_t> words);

  size_t size() const { return rows_.size(); }
  LocalTensor operator[](size_t index) const;

 private:
  std::span<const int64_t> words_;
  std::vector<size_t> rows_;  // start of each row
};

struct DescribedState {
  std::vector<std::byte> inventory;
  std::vector<int64_t> sources;
};

// Describes a state whose values, in the order of `names`, are objects at the positions `objects` and tensors at all
// others. `requires_grad`: a flag for each tensor. Returns nullopt if a tensor's dtype cannot be stored. Throws Error
// (invalid) if the arguments do not belong together.
std::optional<DescribedState> describe_state(std::span<const std::string> names, const TensorTable& tensors,
                                             std::span<const std::byte> requires_grad, std::span<const size_t> objects,
                                             int64_t node);

// Returns the inventory's row of each of the first tensors as a whole; empty if its dtype cannot be stored. There are
// as many as flags in `requires_grad`.
std::vector<std::vector<int64_t>> rows_of_tensors(const TensorTable& tensors, std::span<const std::byte> requires_grad);

// Whether two tables hold tensors of the same dtypes and shapes, at any addresses.
bool same_shapes(const TensorTable& left, const TensorTable& right);

// Returns the indices of tensors that are not contiguous, or have no plain memory, so that this is unknown.
std::vector<size_t> not_contiguous(const TensorTable& tensors);

// Whether a tensor is in host memory or, with `with_cuda`, in the memory of a CUDA device.
bool has_memory(const LocalTensor& tensor, bool with_cuda);

// Returns the flag of each tensor: kOnHost or kOnDevice + i if it has no lazy operation and its storage reaches its
// end. `lazy`, `storage_offsets` and `storage_bytes` have an element for each tensor that `has_memory`, in the order of
// the table; other tensors are not ready. Throws Error (invalid) if their lengths differ from that.
std::vector<uint8_t> ready_tensors(const TensorTable& tensors, bool with_cuda, std::span<const std::byte> lazy,
                                   std::span<const int64_t> storage_offsets,  // elements
                                   std::span<const int64_t> storage_bytes);

// A state in the form that the functions below need. `ready`: the result of ready_tensors.
struct StateTables {
  // Throws Error (invalid) if they do not belong together.
  StateTables(const Inventory& inventory, std::span<const int64_t> sources, std::span<const int64_t> tensors,
              std::span<const std::byte> ready);

  const Inventory& inventory;
  TensorTable tensors;
  std::vector<std::span<const int64_t>> sources;  // source row of each item
  std::span<const std::byte> ready;
};

// Returns groups of items whose memory overlaps between first and last byte. Each group has items of at least two keys,
// because chunks of one key may interleave without sharing an element. Items and groups are in the order of the
// inventory.
std::vector<std::vector<size_t>> items_that_share_memory(const StateTables& state);

// Makes the table of a write (write/writer.h) or a snapshot (stage/snapshot.h) from rows of a local plan: item, dim,
// start, length; and the device of each of its rows (-1: host memory, where alone a write reads). Dim -1 means the
// whole chunk; any other dim means `length` indices along it. Objects have no row. Throws Error (invalid, row) for a
// part that is not in memory or leaves its tensor.
struct CopyTable {
  std::vector<int64_t> rows, devices;
};
CopyTable make_copy_table(const StateTables& state, std::span<const int64_t> local_plan);

// Returns the flag of the tensor of each row of a local plan, without objects.
std::vector<uint8_t> ready_rows(const StateTables& state, std::span<const int64_t> local_plan);

// Makes the engine's read table from rows: item, file, record offset, record length, CRC-32 or -1, stored dtype,
// dimensions n, n chunk sizes, n offsets in the chunk, n lengths, n offsets in the item's chunk. Throws as above. The
// engine itself checks the chunk.
struct FillTable {
  CopyTable copies;           // the engine's table, and the device of each row
  std::vector<int64_t> rest;  // rows that the engine cannot fill, or not fast, because they are short runs on a device
};
FillTable make_read_table(const StateTables& state, std::span<const int64_t> reads);

// Returns the address of a contiguous piece at an offset in the memory. Throws Error (invalid, row) if it leaves the
// memory.
int64_t address_in(std::span<const std::byte> memory, int64_t offset, int64_t dtype, std::span<const int64_t> sizes,
                   int64_t row);

// Makes the engine's copy table (io/box.h) from RouteRound::places (share/routes.h). `memories`: rows of peer (-1:
// this rank), address, bytes. The rest also has rows whose tensor has another than the stored dtype. Throws as above,
// and for rows that leave a memory.
FillTable make_place_table(const StateTables& state, std::span<const int64_t> places,
                           std::span<const int64_t> memories);

}  // namespace vescale_ckpt::state
