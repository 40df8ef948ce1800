// Packs one rank's items into bytes: what the rank holds, or the targets that it fills, described without its tensors.
//
// An item is one chunk of one tensor, or one object. Layers repeat, so many items have equal rows, and each distinct
// row is packed once. Ranks send the packed form to each other (little-endian words; a job has one architecture). It is
// checked on arrival. Fingerprints are computed from its bytes.
//
//   int64 magic, items n, distinct rows d, words of rows w, bytes of names b, node
//   d rows:  kind | dtype << 8 | flags << 16 | ndim << 32,  bytes,  shape[ndim], offset[ndim], size[ndim]
//   u32 numbers[n], padded to 8: the row of each item; rows are numbered in the order in which items first have them
//   u32 ends[n], padded to 8: where each name ends in the names
//   names: UTF-8, padded to 8
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/numbered_strings.h"

namespace vescale_ckpt::state {

enum class ItemKind : uint8_t {
  object = 0,  // any value that is no tensor; it has no dims
  tensor = 1,  // a whole plain tensor
  shard = 2,   // a chunk of a tensor that ranks share
};

// An item has these flags:
constexpr uint16_t kRequiresGrad = 1;
constexpr uint16_t kUncut = 2;      // no plan may cut its chunk, because the stored bytes are not those of its elements
constexpr unsigned kMostDims = 64;  // torch's own limit

struct Item {
  std::string_view name;
  ItemKind kind = ItemKind::object;
  uint8_t dtype = 0;  // dtype code (format/torch_record.h)
  uint16_t flags = 0;
  uint64_t bytes = 0;              // bytes of this chunk; 0 of an object
  std::span<const int64_t> shape;  // shape of the whole tensor
  std::span<const int64_t> offset, size;
};

// Parts that ranks may have in common: all ranks of a mesh have equal numbers and names, and replicas have equal rows.
struct InventoryParts {
  std::span<const std::byte> header;                               // or all bytes, and the others are empty
  std::span<const std::byte> rows = {}, numbers = {}, names = {};  // names: with their ends
};

// A view of packed items. The bytes must outlive it.
class Inventory {
 public:
  Inventory() = default;  // without items
  // Checks every length, offset and number. Throws Error (invalid). The bytes must be 8-aligned.
  explicit Inventory(const InventoryParts& parts);
  explicit Inventory(std::span<const std::byte> bytes) : Inventory(InventoryParts{bytes}) {}

  size_t size() const { return numbers_.size(); }
  Item operator[](size_t index) const;
  int64_t node() const { return node_; }
  // Returns the row number of each item. Items with equal numbers differ only in their names.
  std::span<const uint32_t> numbers() const { return numbers_; }
  // Returns the parts, which make up the packed bytes in this order.
  const InventoryParts& parts() const { return parts_; }

 private:
  void check_rows(size_t rows);
  void check_items(size_t items, size_t name_bytes);
  std::string_view name(size_t index) const;

  InventoryParts parts_;
  std::span<const int64_t> words_;  // words of the rows
  std::vector<uint32_t> rows_;      // start of each row in words_
  std::span<const uint32_t> numbers_;
  const uint32_t* ends_ = nullptr;
  const char* names_ = nullptr;
  int64_t node_ = 0;
};

// The item of a whole plain tensor, whose elements have `bytes` bytes. Throws Error (invalid) for too many dimensions.
Item whole_tensor(std::string_view name, uint8_t dtype, uint16_t flags, uint64_t bytes, std::span<const int64_t> shape);

// Packs an item's row into `row`, and overwrites it.
void pack_row(const Item& item, std::vector<int64_t>& row);

class InventoryBuilder {
 public:
  void add(const Item& item);
  // Adds an item with a packed row. Throws Error (invalid) if the row's length contradicts its head.
  void add(std::string_view name, std::span<const std::byte> row);
  std::vector<std::byte> pack(int64_t node = 0) const;

 private:
  std::vector<int64_t> row_;  // the row that is being packed
  NumberedStrings rows_;      // the bytes of each distinct row
  std::vector<uint32_t> numbers_, ends_;
  std::string names_;
};

}  // namespace vescale_ckpt::state
