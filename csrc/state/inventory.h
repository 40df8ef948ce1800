// One rank's items, packed into bytes: what it holds, or what it wants filled, described without its tensors.
//
// An item is one box of one tensor, or one object. Layers repeat, so that many items have equal rows: each distinct row
// stands there once. The packed form travels between ranks as it is (little-endian words, one architecture a job) and
// is checked when it arrives. Fingerprints are computed from its bytes.
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
  object = 0,  // anything that is no tensor; no dims
  tensor = 1,  // a whole plain tensor
  shard = 2,   // a box of a tensor that ranks share
};

// Flags of an item:
constexpr uint16_t kRequiresGrad = 1;
constexpr uint16_t kUncut = 2;      // no plan may cut its box: what is stored is not the bytes of its elements
constexpr unsigned kMostDims = 64;  // torch's own limit

struct Item {
  std::string_view name;
  ItemKind kind = ItemKind::object;
  uint8_t dtype = 0;  // code: format/torch_record.h
  uint16_t flags = 0;
  uint64_t bytes = 0;              // of this box; of an object, those it had when last saved
  std::span<const int64_t> shape;  // of the whole tensor
  std::span<const int64_t> offset, size;
};

// What ranks may have in common: of a mesh, all ranks have equal numbers and names, and replicas have equal rows.
struct InventoryParts {
  std::span<const std::byte> header;                               // or all of it, and the others are empty
  std::span<const std::byte> rows = {}, numbers = {}, names = {};  // names: with their ends
};

// A view of packed items: the bytes must outlive it.
class Inventory {
 public:
  Inventory() = default;  // of nothing
  // Checks every length, offset and number in it. Throws Error (invalid). The bytes must be 8-aligned.
  explicit Inventory(const InventoryParts& parts);
  explicit Inventory(std::span<const std::byte> bytes) : Inventory(InventoryParts{bytes}) {}

  size_t size() const { return numbers_.size(); }
  Item operator[](size_t index) const;
  int64_t node() const { return node_; }
  // The row of each item: items of equal numbers are equal but for their names.
  std::span<const uint32_t> numbers() const { return numbers_; }
  // One behind another they are the packed bytes. None of them holds another.
  const InventoryParts& parts() const { return parts_; }

 private:
  void check_rows(size_t rows);
  void check_items(size_t items, size_t name_bytes);
  std::string_view name(size_t index) const;

  InventoryParts parts_;
  std::span<const int64_t> words_;  // of the rows
  std::vector<uint32_t> rows_;      // where each row starts in words_
  std::span<const uint32_t> numbers_;
  const uint32_t* ends_ = nullptr;
  const char* names_ = nullptr;
  int64_t node_ = 0;
};

// The row of an item as an inventory holds it, in the place of what `row` held.
void pack_row(const Item& item, std::vector<int64_t>& row);

class InventoryBuilder {
 public:
  void add(const Item& item);
  // The same of a row as the inventory holds it. Throws Error (invalid) if its length is not the one that it tells.
  void add(std::string_view name, std::span<const std::byte> row);
  std::vector<std::byte> pack(int64_t node = 0) const;

 private:
  std::vector<int64_t> row_;  // the one at hand
  NumberedStrings rows_;      // as bytes
  std::vector<uint32_t> numbers_, ends_;
  std::string names_;
};

}  // namespace vescale_ckpt::state
