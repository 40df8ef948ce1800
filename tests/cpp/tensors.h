// Tensors for tests: memory at a chosen place in a page, random contents, and their rows for the writer and the reader.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <random>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "base/memory.h"
#include "format/torch_record.h"
#include "read/reader.h"
#include "write/writer.h"

namespace vescale_ckpt {

inline constexpr uint64_t kTorchPlace = 64;  // bytes behind a page: where torch puts a large CPU tensor

// So many bytes that start `place` bytes behind a page; not a byte more, so that AddressSanitizer sees the end.
class Memory {
 public:
  explicit Memory(uint64_t bytes, uint64_t place = kTorchPlace) : bytes_(bytes), place_(place) {
    void* block = nullptr;
    if (::posix_memalign(&block, kBlock, place + bytes) != 0) throw std::bad_alloc();
    block_.reset(static_cast<std::byte*>(block));
    std::memset(block_.get(), 0xA5, place + bytes);
  }

  std::byte* data() const { return block_.get() + place_; }
  uint64_t size() const { return bytes_; }
  std::span<std::byte> bytes() const { return {data(), bytes_}; }
  std::string_view text() const { return {reinterpret_cast<const char*>(data()), bytes_}; }

 private:
  struct Free {
    void operator()(std::byte* block) const { std::free(block); }
  };
  std::unique_ptr<std::byte, Free> block_;
  uint64_t bytes_;
  uint64_t place_;
};

inline void fill_random(std::span<std::byte> bytes, uint64_t seed) {
  std::mt19937_64 random(seed);
  for (uint64_t at = 0; at < bytes.size(); at += sizeof(uint64_t)) {
    const uint64_t word = random();
    std::memcpy(bytes.data() + at, &word, std::min<uint64_t>(sizeof word, bytes.size() - at));
  }
}

inline uint32_t dtype_code(std::string_view name) {
  return format::dtype_named(name).value();
}

inline int64_t address(const std::byte* data) {
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(data));
}

inline int64_t address(const Memory& memory) {
  return address(memory.data());
}

using Sizes = std::vector<int64_t>;

inline Sizes row_major(const Sizes& sizes) {
  return format::contiguous_strides(sizes);
}

// The strides of a tensor whose dimensions lie the other way round in memory.
inline Sizes column_major(const Sizes& sizes) {
  Sizes strides = row_major(Sizes(sizes.rbegin(), sizes.rend()));
  std::ranges::reverse(strides);
  return strides;
}

// A contiguous tensor with random contents.
struct Tensor {
  uint32_t dtype;
  Sizes sizes;
  Memory memory;

  Tensor(std::string_view dtype_name, Sizes shape, uint64_t place = kTorchPlace, uint64_t seed = 1)
      : dtype(dtype_code(dtype_name)),
        sizes(std::move(shape)),
        memory(format::tensor_bytes(format::dtypes()[dtype], sizes), place) {
    fill_random(memory.bytes(), seed);
  }

  // A tensor of bytes.
  static Tensor of_bytes(uint64_t bytes, uint64_t place = kTorchPlace, uint64_t seed = 1) {
    return Tensor("uint8", {static_cast<int64_t>(bytes)}, place, seed);
  }

  write::RecordSource source() const {
    write::RecordSource row;
    row.framing = std::make_shared<const format::TensorRecord>(format::dtypes()[dtype], sizes);
    row.data = memory.data();
    row.bytes = memory.size();
    return row;
  }

  read::ReadItem box_item(uint32_t file, const write::PlacedRecord& placed, const Sizes& offsets,
                          const Sizes& box_sizes, std::byte* target, const Sizes& strides) const {
    const io::Box box(format::dtypes()[dtype].item_bytes, sizes, offsets, box_sizes, strides);
    return {file, placed.offset, placed.length, dtype, sizes, box, target, read::kUnknownCrc};
  }

  read::ReadItem box_item(uint32_t file, const write::PlacedRecord& placed, const Sizes& offsets,
                          const Sizes& box_sizes, std::byte* target) const {
    return box_item(file, placed, offsets, box_sizes, target, row_major(box_sizes));
  }

  read::ReadItem item(uint32_t file, const write::PlacedRecord& placed, std::byte* target) const {
    return box_item(file, placed, Sizes(sizes.size(), 0), sizes, target);
  }

  // The bytes of a box of it, contiguous.
  Memory box(const Sizes& offsets, const Sizes& box_sizes) const {
    const io::Box layout(format::dtypes()[dtype].item_bytes, sizes, offsets, box_sizes, row_major(box_sizes));
    Memory bytes(layout.bytes());
    layout.scatter(memory.data(), 0, memory.size(), bytes.data());
    return bytes;
  }
};

}  // namespace vescale_ckpt
