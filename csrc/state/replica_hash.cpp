#include "state/replica_hash.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "format/torch_record.h"

namespace vescale_ckpt::state {
namespace {

[[noreturn]] void malformed_chunks() {
  throw Error::invalid("a table of chunks to compare is malformed");
}

template <typename Integer>
int64_t integer_at(int64_t address) {
  Integer value;
  std::memcpy(&value, reinterpret_cast<const void*>(address), sizeof value);  // NOLINT(performance-no-int-to-ptr)
  return static_cast<int64_t>(value);
}

int64_t integer_at(int64_t address, int64_t bytes) {
  switch (bytes) {
    case 1:
      return integer_at<int8_t>(address);
    case 2:
      return integer_at<int16_t>(address);
    case 4:
      return integer_at<int32_t>(address);
    default:
      return integer_at<int64_t>(address);
  }
}

// Gives the addresses of elements of a chunk.
struct Chunk {
  LocalTensor tensor;
  std::span<const int64_t> offset, size;

  int64_t count() const {
    int64_t product = 1;
    for (size_t dim = 0; dim < size.size(); ++dim) {
      const bool inside = offset[dim] >= 0 && size[dim] > 0 && offset[dim] <= tensor.shape[dim] - size[dim];
      if (!inside || __builtin_mul_overflow(product, size[dim], &product)) malformed_chunks();
    }
    return product;
  }

  // Returns the address of the element at an index in C's order.
  int64_t address(int64_t position, int64_t item_bytes) const {
    int64_t element = 0;
    for (size_t dim = size.size(); dim-- > 0; position /= size[dim]) {
      element += (offset[dim] + position % size[dim]) * tensor.strides[dim];
    }
    return tensor.address + element * item_bytes;
  }
};

}  // namespace

std::vector<uint64_t> replica_hashes(const StateTables& state, std::span<const uint32_t> items, const Sample& sample,
                                     std::span<const uint64_t> factors) {
  std::vector<uint64_t> hashes;
  hashes.reserve(items.size());
  for (const uint32_t number : items) {
    if (number >= state.inventory.size()) malformed_chunks();
    const Item item = state.inventory[number];
    const std::span<const int64_t> source = state.sources[number];
    if (source[0] < 0 || item.kind == ItemKind::object) malformed_chunks();
    const auto index = static_cast<size_t>(source[0]);
    const LocalTensor tensor = state.tensors[index];
    if (static_cast<uint8_t>(state.ready[index]) != kOnHost) {
      hashes.push_back(kNotHashed);
      continue;
    }
    const bool fits = tensor.shape.size() == item.size.size() && tensor.device == kHostDevice && tensor.dtype >= 0;
    if (!fits) malformed_chunks();
    const Chunk chunk{tensor, source.subspan(2), item.size};

    const int64_t item_bytes = format::dtypes()[static_cast<size_t>(tensor.dtype)].item_bytes;
    const int64_t integers = item_bytes == 16 ? 2 : 1, bytes = item_bytes / integers;
    const int64_t total = chunk.count(), count = std::min<int64_t>(sample.count(item.bytes), total);
    if (static_cast<size_t>(count * integers) > factors.size()) malformed_chunks();
    const int64_t step = total / std::max<int64_t>(1, count), first = count > 1 ? step / 2 : 0;
    uint64_t hash = 0;
    for (int64_t i = 0; i < count * integers; ++i) {
      const int64_t from = chunk.address(first + i / integers * step, item_bytes) + i % integers * bytes;
      int64_t value = integer_at(from, bytes);
      value ^= value >> 31;
      hash += static_cast<uint64_t>(value) * factors[static_cast<size_t>(i)];
    }
    hashes.push_back(hash == kNotHashed ? 1 : hash);
  }
  return hashes;
}

OfferedHashes offered_hashes(const StateTables& state, const Sample& sample, std::span<const uint64_t> factors) {
  const Inventory& all = state.inventory;
  std::vector<uint32_t> items;
  for (uint32_t i = 0; i < all.size(); ++i) {
    const Item item = all[i];
    if (item.kind != ItemKind::object && item.bytes != 0) items.push_back(i);
  }
  const std::vector<uint64_t> found = replica_hashes(state, items, sample, factors);
  OfferedHashes result{std::vector<uint64_t>(all.size()), {}};
  for (size_t i = 0; i < items.size(); ++i) {
    result.hashes[items[i]] = found[i];
    if (found[i] == kNotHashed) result.rest.push_back(items[i]);
  }
  return result;
}

}  // namespace vescale_ckpt::state
