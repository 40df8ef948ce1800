#include "plan/tables.h"

#include <algorithm>
#include <string>

#include "error.h"
#include "format/torch_record.h"

namespace vescale_ckpt {
namespace {

constexpr size_t kTensorHead = 4, kSourceHead = 2, kPartRow = 4, kReadHead = 7;

[[noreturn]] void malformed(const char* what, int64_t row = Error::kNoItem) {
  throw Error::invalid(what, row);
}

// Dimensions of a row whose count is the last word of its head; the row has `spans` numbers a dimension.
size_t dims_of(std::span<const int64_t> words, size_t at, size_t head, size_t spans, const char* table) {
  if (words.size() - at < head) malformed(table);
  const int64_t dims = words[at + head - 1];
  if (dims < 0 || dims > kMostDims || words.size() - at - head < spans * static_cast<size_t>(dims)) malformed(table);
  return static_cast<size_t>(dims);
}

bool multiply_add(int64_t a, int64_t b, int64_t* sum) {
  int64_t product = 0;
  return !__builtin_mul_overflow(a, b, &product) && !__builtin_add_overflow(*sum, product, sum);
}

// A part of an item's box within the local tensor that holds it.
class Region {
 public:
  Region(const StateTables& state, int64_t item, int64_t row) : row_(row) {
    if (item < 0 || static_cast<uint64_t>(item) >= state.inventory.size()) malformed("no such item", row);
    const auto index = static_cast<size_t>(item);
    box_ = state.inventory[index].size;
    const std::span<const int64_t> source = state.sources[index];
    if (source[0] < 0) malformed("an object is not in a tensor", row);
    const auto tensor = static_cast<size_t>(source[0]);
    offset_ = source.subspan(kSourceHead);
    tensor_ = state.tensors[tensor];
    if (box_.size() != tensor_.shape.size()) malformed("an item and its tensor differ in dimensions", row);
    if (state.ready[tensor] == std::byte{0} || tensor_.device != kHostDevice || tensor_.dtype < 0) {
      malformed("a tensor is not in memory that the engine can use", row);
    }
  }

  std::span<const int64_t> box() const { return box_; }
  std::span<const int64_t> strides() const { return tensor_.strides; }
  int64_t dtype() const { return tensor_.dtype; }

  // Narrows dimension `dim` to `length` indices of the box from `start` on.
  void narrow(size_t dim, int64_t start, int64_t length) {
    int64_t end = 0, at = 0, local_end = 0;
    if (start < 0 || length < 0 || __builtin_add_overflow(start, length, &end) || end > box_[dim]) {
      malformed("rows of a plan leave their item", row_);
    }
    if (__builtin_add_overflow(offset_[dim], start, &at) || offset_[dim] < 0 ||
        __builtin_add_overflow(at, length, &local_end) || local_end > tensor_.shape[dim]) {
      malformed("an item leaves the tensor that holds it", row_);
    }
    empty_ = empty_ || length == 0;
    if (!multiply_add(at, tensor_.strides[dim], &first_)) malformed("an item's place overflows", row_);
  }

  // Of the first element; that of an empty region is never used.
  int64_t address() const {
    int64_t address = tensor_.address;
    const uint32_t item_bytes = dtypes()[static_cast<size_t>(tensor_.dtype)].item_bytes;
    if (empty_) return address;
    if (!multiply_add(first_, item_bytes, &address)) malformed("an item's place overflows", row_);
    return address;
  }

 private:
  int64_t row_;
  LocalTensor tensor_{};
  std::span<const int64_t> box_, offset_;
  int64_t first_ = 0;  // elements from the tensor's first
  bool empty_ = false;
};

void append(std::vector<int64_t>& table, std::span<const int64_t> values) {
  table.insert(table.end(), values.begin(), values.end());
}

}  // namespace

TensorTable::TensorTable(std::span<const int64_t> words) : words_(words) {
  for (size_t at = 0; at < words.size();) {
    rows_.push_back(at);
    const size_t dims = dims_of(words, at, kTensorHead, 2, "a table of tensors is malformed");
    const int64_t dtype = words[at + 1];
    if (dtype < -1 || dtype >= static_cast<int64_t>(dtypes().size())) malformed("unknown dtype in a table of tensors");
    at += kTensorHead + 2 * dims;
  }
}

LocalTensor TensorTable::operator[](size_t index) const {
  const size_t at = rows_[index];
  const auto dims = static_cast<size_t>(words_[at + 3]);
  return {words_[at], words_[at + 1], words_[at + 2], words_.subspan(at + kTensorHead, dims),
          words_.subspan(at + kTensorHead + dims, dims)};
}

bool same_shapes(const TensorTable& left, const TensorTable& right) {
  if (left.size() != right.size()) return false;
  for (size_t i = 0; i < left.size(); ++i) {
    const LocalTensor a = left[i], b = right[i];
    if (a.dtype != b.dtype || !std::ranges::equal(a.shape, b.shape)) return false;
  }
  return true;
}

std::vector<std::byte> ready_tensors(const TensorTable& tensors, std::span<const std::byte> lazy,
                                     std::span<const int64_t> storage_offsets, std::span<const int64_t> storage_bytes) {
  std::vector<std::byte> ready(tensors.size());
  size_t host = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const LocalTensor tensor = tensors[i];
    if (tensor.device != kHostDevice) continue;
    const size_t at = host++;
    if (at >= lazy.size() || at >= storage_offsets.size() || at >= storage_bytes.size()) continue;
    int64_t last = storage_offsets[at], end = 0;  // elements from the storage's start
    bool fits = tensor.dtype >= 0;
    for (size_t dim = 0; dim < tensor.shape.size(); ++dim) {
      fits = fits && multiply_add(tensor.shape[dim] - 1, tensor.strides[dim], &last);
    }
    fits = fits && !__builtin_add_overflow(last, int64_t{1}, &end) &&
           !__builtin_mul_overflow(end, dtypes()[static_cast<size_t>(tensor.dtype)].item_bytes, &end) &&
           end <= storage_bytes[at];
    const bool empty = tensor.dtype >= 0 && std::ranges::find(tensor.shape, 0) != tensor.shape.end();
    ready[i] = std::byte{lazy[at] == std::byte{0} && (empty || fits)};
  }
  if (host != lazy.size() || host != storage_offsets.size() || host != storage_bytes.size()) {
    malformed("storages are not those of the tensors in host memory");
  }
  return ready;
}

StateTables::StateTables(const Inventory& items, std::span<const int64_t> source_words,
                         std::span<const int64_t> tensor_words, std::span<const std::byte> ready_bytes)
    : inventory(items), tensors(tensor_words), ready(ready_bytes) {
  constexpr const char* kMalformed = "a table of sources is malformed";
  for (size_t at = 0; at < source_words.size();) {
    const size_t dims = dims_of(source_words, at, kSourceHead, 1, kMalformed);
    const int64_t tensor = source_words[at];
    if (tensor < -1 || tensor >= static_cast<int64_t>(tensors.size())) malformed(kMalformed);
    if (sources.size() == inventory.size()) malformed(kMalformed);
    const Item item = inventory[sources.size()];
    if ((item.kind == ItemKind::object) != (tensor < 0) || item.shape.size() != dims) malformed(kMalformed);
    sources.push_back(source_words.subspan(at, kSourceHead + dims));
    at += kSourceHead + dims;
  }
  if (sources.size() != inventory.size() || ready.size() != tensors.size()) malformed(kMalformed);
}

std::vector<int64_t> make_write_table(const StateTables& state, std::span<const int64_t> part) {
  if (part.size() % kPartRow != 0) malformed("a rank's part of a plan is malformed");
  std::vector<int64_t> table;
  table.reserve(part.size() * 2);
  for (size_t at = 0; at < part.size(); at += kPartRow) {
    const auto row = static_cast<int64_t>(at / kPartRow);
    const int64_t item = part[at], dim = part[at + 1], start = part[at + 2], length = part[at + 3];
    if (item >= 0 && static_cast<uint64_t>(item) < state.inventory.size() &&
        state.inventory[static_cast<size_t>(item)].kind == ItemKind::object) {
      continue;
    }
    Region region(state, item, row);
    const size_t dims = region.box().size();
    if (dim < -1 || dim >= static_cast<int64_t>(dims)) malformed("no such dimension", row);
    if (region.dtype() != state.inventory[static_cast<size_t>(item)].dtype) {
      malformed("a tensor is not of its item's dtype", row);
    }
    for (size_t i = 0; i < dims; ++i) {
      const bool cut = static_cast<int64_t>(i) == dim;
      region.narrow(i, cut ? start : 0, cut ? length : region.box()[i]);
    }
    table.push_back(region.dtype());
    table.push_back(region.address());
    table.push_back(static_cast<int64_t>(dims));
    append(table, region.box());
    if (dim >= 0) table[table.size() - dims + static_cast<size_t>(dim)] = length;
    append(table, region.strides());
  }
  return table;
}

std::vector<int64_t> make_read_table(const StateTables& state, std::span<const int64_t> reads) {
  std::vector<int64_t> table;
  table.reserve(reads.size());
  int64_t row = 0;
  for (size_t at = 0; at < reads.size(); ++row) {
    const size_t dims = dims_of(reads, at, kReadHead, 4, "a table of reads is malformed");
    const auto head = reads.subspan(at, kReadHead), boxes = reads.subspan(at + kReadHead, 4 * dims);
    const auto lengths = boxes.subspan(2 * dims, dims), offsets = boxes.subspan(3 * dims, dims);
    Region region(state, head[0], row);
    if (region.box().size() != dims) malformed("an item and its read differ in dimensions", row);
    if (region.dtype() != head[5]) malformed("a tensor is not of the stored dtype", row);
    for (size_t dim = 0; dim < dims; ++dim) region.narrow(dim, offsets[dim], lengths[dim]);
    append(table, head.subspan(1));
    append(table, boxes.first(3 * dims));
    table.push_back(region.address());
    append(table, region.strides());
    at += kReadHead + 4 * dims;
  }
  return table;
}

}  // namespace vescale_ckpt
