// One rank's items, packed into bytes: what it holds, or what it wants filled, described without its tensors.
//
// A row is one box of one tensor, or one object. The packed form travels between ranks as it is (little-endian words,
// one architecture a job) and is checked when it arrives. Fingerprints are computed from its bytes.
//
//   int64 magic, items n, words of rows w, bytes of names b, node, 0
//   n rows:  kind | dtype << 8 | flags << 16 | ndim << 32,  bytes,  shape[ndim], offset[ndim], size[ndim]
//   u32 ends[n], padded to 8: where each name ends in the names
//   names: UTF-8, padded to 8
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace vescale_ckpt::state {

enum class ItemKind : uint8_t {
  object = 0,  // anything that is no tensor; no dims
  tensor = 1,  // a whole plain tensor
  shard = 2,   // a box of a tensor that ranks share
};

constexpr uint16_t kRequiresGrad = 1;  // flag
constexpr unsigned kMostDims = 64;     // torch's own limit

struct Item {
  std::string_view name;
  ItemKind kind = ItemKind::object;
  uint8_t dtype = 0;  // code: format/torch_record.h
  uint16_t flags = 0;
  uint64_t bytes = 0;              // of this box; of an object, those it had when last saved
  std::span<const int64_t> shape;  // of the whole tensor
  std::span<const int64_t> offset, size;
};

// A view of packed items: the bytes must outlive it.
class Inventory {
 public:
  Inventory() = default;  // of nothing
  // Checks every length, offset and number in it. Throws Error (invalid). `bytes` must be 8-aligned.
  explicit Inventory(std::span<const std::byte> bytes);

  size_t size() const { return rows_.size(); }
  Item operator[](size_t index) const;
  int64_t node() const { return node_; }
  // Header and rows in words; they and the names are all of the bytes.
  std::span<const int64_t> header() const { return header_; }
  std::span<const int64_t> row_words() const { return words_; }
  // All names with their ends: ranks whose names are equal have equal blocks.
  std::span<const std::byte> names_block() const { return names_block_; }

 private:
  std::string_view name(size_t index) const;

  std::span<const int64_t> header_, words_;
  std::vector<uint32_t> rows_;  // where each row starts in words_
  std::span<const std::byte> names_block_;
  const uint32_t* ends_ = nullptr;
  const char* names_ = nullptr;
  int64_t node_ = 0;
};

class InventoryBuilder {
 public:
  void add(const Item& item);
  std::vector<std::byte> pack(int64_t node = 0) const;

 private:
  std::vector<int64_t> words_;
  std::vector<uint32_t> ends_;
  std::string names_;
};

}  // namespace vescale_ckpt::state
