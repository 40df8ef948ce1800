#include "state/tables.h"

#include <algorithm>
#include <map>
#include <string>
#include <tuple>
#include <utility>

#include "base/error.h"
#include "format/torch_record.h"

namespace vescale_ckpt::state {
namespace {

constexpr size_t kTensorHead = 4, kSourceHead = 2, kLocalPlanRow = 4, kReadHead = 7, kPlaceHead = 5, kMemoryRow = 3;

[[noreturn]] void malformed(const char* what, int64_t row = Error::kNoItem) {
  throw Error::invalid(what, row);
}

// Returns the number of dimensions of a row. It is the last word of the head; the row has `spans` numbers a dimension.
size_t dims_of(std::span<const int64_t> words, size_t at, size_t head, size_t spans, const char* table) {
  if (words.size() - at < head) malformed(table);
  const int64_t dims = words[at + head - 1];
  if (dims < 0 || dims > kMostDims || words.size() - at - head < spans * static_cast<size_t>(dims)) malformed(table);
  return static_cast<size_t>(dims);
}

struct Area {
  int64_t device, begin, end;  // addresses
  size_t item;
};

constexpr int64_t cuda_device(int64_t number) {
  return kCudaDevice + (number << 32);
}

bool multiply_add(int64_t a, int64_t b, int64_t* sum) {
  int64_t product = 0;
  return !__builtin_mul_overflow(a, b, &product) && !__builtin_add_overflow(*sum, product, sum);
}

// A part of an item's chunk within the local tensor that holds it.
class LocalChunk {
 public:
  LocalChunk(const StateTables& state, int64_t item, int64_t row) : row_(row) {
    if (item < 0 || static_cast<uint64_t>(item) >= state.inventory.size()) malformed("no such item", row);
    const auto index = static_cast<size_t>(item);
    chunk_ = state.inventory[index].size;
    const std::span<const int64_t> source = state.sources[index];
    if (source[0] < 0) malformed("an object is not in a tensor", row);
    const auto tensor = static_cast<size_t>(source[0]);
    offset_ = source.subspan(kSourceHead);
    tensor_ = state.tensors[tensor];
    if (chunk_.size() != tensor_.shape.size()) malformed("an item and its tensor differ in dimensions", row);
    const auto ready = static_cast<uint8_t>(state.ready[tensor]);
    device_ = static_cast<int64_t>(ready) - kOnDevice;
    readable_ = ready != kNotReady && tensor_.dtype >= 0 &&
                tensor_.device == (device_ < 0 ? kHostDevice : cuda_device(device_));
  }

  // Whether the engine or a snapshot may read it.
  bool is_readable() const { return readable_; }
  std::span<const int64_t> chunk() const { return chunk_; }
  std::span<const int64_t> strides() const { return tensor_.strides; }
  int64_t dtype() const { return tensor_.dtype; }
  int64_t device() const { return device_; }  // -1: host memory, if it is readable

  // Narrows dimension `dim` to `length` indices of the chunk from `start` on.
  void narrow(size_t dim, int64_t start, int64_t length) {
    int64_t end = 0, at = 0, local_end = 0;
    if (start < 0 || length < 0 || __builtin_add_overflow(start, length, &end) || end > chunk_[dim]) {
      malformed("rows of a plan leave their item", row_);
    }
    if (__builtin_add_overflow(offset_[dim], start, &at) || offset_[dim] < 0 ||
        __builtin_add_overflow(at, length, &local_end) || local_end > tensor_.shape[dim]) {
      malformed("an item leaves the tensor that holds it", row_);
    }
    empty_ = empty_ || length == 0;
    if (!multiply_add(at, tensor_.strides[dim], &first_)) malformed("an item's place overflows", row_);
  }

  // Whether the engine may fill it, and on a device need not do it in runs of a few bytes.
  bool fast_to_fill(std::span<const int64_t> lengths) const {
    constexpr int64_t kLeastRun = 4 << 10;
    if (!readable_ || device_ < 0) return readable_;
    const int64_t item_bytes = format::dtypes()[static_cast<size_t>(tensor_.dtype)].item_bytes;
    int64_t run = 1;  // elements that lie together
    for (size_t dim = lengths.size(); dim-- > 0;) {
      if (lengths[dim] == 0) return true;
      if (lengths[dim] == 1) continue;
      if (tensor_.strides[dim] != run) return run >= kLeastRun / item_bytes;
      if (__builtin_mul_overflow(run, lengths[dim], &run)) return true;
    }
    return true;
  }

  // Returns the address of the first element. The address of an empty part is never used.
  int64_t address() const {
    int64_t address = tensor_.address;
    const uint32_t item_bytes = format::dtypes()[static_cast<size_t>(tensor_.dtype)].item_bytes;
    if (empty_) return address;
    if (!multiply_add(first_, item_bytes, &address)) malformed("an item's place overflows", row_);
    return address;
  }

 private:
  int64_t row_;
  LocalTensor tensor_{};
  std::span<const int64_t> chunk_, offset_;
  int64_t device_ = -1;
  bool readable_ = false;
  int64_t first_ = 0;  // first element, counted from the tensor's first
  bool empty_ = false;
};

bool is_object(const StateTables& state, int64_t item) {
  return item >= 0 && static_cast<uint64_t>(item) < state.inventory.size() &&
         state.inventory[static_cast<size_t>(item)].kind == ItemKind::object;
}

// Makes a table of rows: a head, whose last word is the number of dimensions n and word `item_at` an item, then n sizes
// of what is stored, n offsets in it, n lengths and n offsets in the item's chunk. `append_head(head, sizes, local,
// number, table)` appends the first words of a row; false: it is one of the rest.
template <typename AppendHead>
FillTable fill_table(const StateTables& state, std::span<const int64_t> rows, size_t head_words, size_t item_at,
                     const AppendHead& append_head) {
  FillTable made;
  std::vector<int64_t>& table = made.copies.rows;
  table.reserve(rows.size());
  int64_t number = 0;
  for (size_t at = 0; at < rows.size(); ++number) {
    const size_t dims = dims_of(rows, at, head_words, 4, "a table of what fills items is malformed");
    const auto head = rows.subspan(at, head_words), boxes = rows.subspan(at + head_words, 4 * dims);
    const auto lengths = boxes.subspan(2 * dims, dims), offsets = boxes.last(dims);
    at += head_words + 4 * dims;
    LocalChunk local(state, head[item_at], number);
    if (local.chunk().size() != dims) malformed("an item and what fills it differ in dimensions", number);
    for (size_t dim = 0; dim < dims; ++dim) local.narrow(dim, offsets[dim], lengths[dim]);
    if (!local.fast_to_fill(lengths) || !append_head(head, boxes.first(dims), local, number, table)) {
      made.rest.push_back(number);
      continue;
    }
    append(table, boxes.first(3 * dims));
    table.push_back(local.address());
    append(table, local.strides());
    made.copies.devices.push_back(local.device());
  }
  return made;
}

Item item_of(const LocalTensor& tensor, std::byte requires_grad, std::string_view name) {
  const uint64_t bytes = format::tensor_bytes(format::dtypes()[static_cast<size_t>(tensor.dtype)], tensor.shape);
  const uint16_t flags = requires_grad != std::byte{0} ? kRequiresGrad : 0;
  return whole_tensor(name, static_cast<uint8_t>(tensor.dtype), flags, bytes, tensor.shape);
}

void add_source(int64_t tensor, size_t dims, std::vector<int64_t>& sources) {
  sources.push_back(tensor);
  sources.push_back(static_cast<int64_t>(dims));
  sources.resize(sources.size() + dims);
}

}  // namespace

TensorTable::TensorTable(std::span<const int64_t> words) : words_(words) {
  rows_.reserve(words.size() / (kTensorHead + 4));
  for (size_t at = 0; at < words.size();) {
    rows_.push_back(at);
    const size_t dims = dims_of(words, at, kTensorHead, 2, "a table of tensors is malformed");
    const int64_t dtype = words[at + 1];
    if (dtype < -1 || dtype >= static_cast<int64_t>(format::dtypes().size()))
      malformed("unknown dtype in a table of tensors");
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

std::vector<size_t> not_contiguous(const TensorTable& tensors) {
  std::vector<size_t> found;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const LocalTensor tensor = tensors[i];
    if (tensor.device < 0 || !format::contiguous(tensor.shape, tensor.strides)) found.push_back(i);
  }
  return found;
}

bool has_memory(const LocalTensor& tensor, bool with_cuda) {
  const int64_t number = tensor.device >> 32;
  return tensor.device == kHostDevice || (with_cuda && number >= 0 && tensor.device == cuda_device(number));
}

std::vector<uint8_t> ready_tensors(const TensorTable& tensors, bool with_cuda, std::span<const std::byte> lazy,
                                   std::span<const int64_t> storage_offsets, std::span<const int64_t> storage_bytes) {
  constexpr int64_t kMostDevices = UINT8_MAX - kOnDevice + 1;
  std::vector<uint8_t> ready(tensors.size(), kNotReady);
  size_t asked = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const LocalTensor tensor = tensors[i];
    if (!has_memory(tensor, with_cuda)) continue;
    const bool on_device = tensor.device != kHostDevice;
    const int64_t number = tensor.device >> 32;
    const size_t at = asked++;
    if (at >= lazy.size() || at >= storage_offsets.size() || at >= storage_bytes.size()) continue;
    int64_t last = storage_offsets[at], end = 0;  // elements, counted from the storage's start
    bool fits = tensor.dtype >= 0;
    for (size_t dim = 0; dim < tensor.shape.size(); ++dim) {
      fits = fits && multiply_add(tensor.shape[dim] - 1, tensor.strides[dim], &last);
    }
    fits = fits && !__builtin_add_overflow(last, int64_t{1}, &end) &&
           !__builtin_mul_overflow(end, format::dtypes()[static_cast<size_t>(tensor.dtype)].item_bytes, &end) &&
           end <= storage_bytes[at];
    int64_t first = 0;  // bytes, counted from the storage's start
    fits = fits &&
           multiply_add(storage_offsets[at], format::dtypes()[static_cast<size_t>(tensor.dtype)].item_bytes, &first) &&
           tensor.address != first;  // otherwise the storage has no memory and reads as zeros
    const bool empty = tensor.dtype >= 0 && std::ranges::find(tensor.shape, 0) != tensor.shape.end();
    if (lazy[at] != std::byte{0} || !(empty || fits)) continue;
    if (!on_device) ready[i] = kOnHost;
    if (on_device && number < kMostDevices) ready[i] = static_cast<uint8_t>(kOnDevice + number);
  }
  if (asked != lazy.size() || asked != storage_offsets.size() || asked != storage_bytes.size()) {
    malformed("storages are not those of the tensors in memory");
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

std::vector<std::vector<size_t>> items_that_share_memory(const StateTables& state) {
  std::vector<Area> areas;
  for (size_t number = 0; number < state.sources.size(); ++number) {
    const std::span<const int64_t> source = state.sources[number];
    if (source[0] < 0) continue;
    const LocalTensor tensor = state.tensors[static_cast<size_t>(source[0])];
    const Item item = state.inventory[number];
    if (tensor.device < 0 || tensor.dtype < 0 || item.bytes == 0) continue;
    int64_t first = 0, last = 0;  // elements, counted from the tensor's first
    for (size_t dim = 0; dim < item.size.size(); ++dim) {
      first += source[2 + dim] * tensor.strides[dim];
      last += (item.size[dim] - 1) * tensor.strides[dim];
    }
    const int64_t bytes = format::dtypes()[static_cast<size_t>(tensor.dtype)].item_bytes;
    const int64_t begin = tensor.address + first * bytes;
    areas.push_back({tensor.device, begin, begin + (last + 1) * bytes, number});
  }
  std::ranges::sort(areas, {}, [](const Area& area) { return std::tuple(area.device, area.begin, area.item); });

  std::vector<std::vector<size_t>> groups;
  for (size_t at = 0; at < areas.size();) {
    const size_t first = at;
    int64_t end = areas[at].end;
    for (++at; at < areas.size() && areas[at].device == areas[first].device && areas[at].begin < end; ++at) {
      end = std::max(end, areas[at].end);
    }
    std::vector<size_t> group;
    for (size_t i = first; i < at; ++i) group.push_back(areas[i].item);
    const auto of_first = [&](size_t item) {
      return state.inventory[item].name == state.inventory[group.front()].name;
    };
    if (std::ranges::all_of(group, of_first)) continue;
    std::ranges::sort(group);
    groups.push_back(std::move(group));
  }
  std::ranges::sort(groups);
  return groups;
}

CopyTable make_copy_table(const StateTables& state, std::span<const int64_t> local_plan) {
  if (local_plan.size() % kLocalPlanRow != 0) malformed("a local plan is malformed");
  CopyTable made;
  made.rows.reserve(local_plan.size() * 2);
  made.devices.reserve(local_plan.size() / kLocalPlanRow);
  for (size_t at = 0; at < local_plan.size(); at += kLocalPlanRow) {
    const auto row = static_cast<int64_t>(at / kLocalPlanRow);
    const int64_t item = local_plan[at], dim = local_plan[at + 1], start = local_plan[at + 2],
                  length = local_plan[at + 3];
    if (is_object(state, item)) continue;
    LocalChunk local(state, item, row);
    if (!local.is_readable()) malformed("a tensor is not in memory that the engine can use", row);
    const size_t dims = local.chunk().size();
    if (dim < -1 || dim >= static_cast<int64_t>(dims)) malformed("no such dimension", row);
    if (local.dtype() != state.inventory[static_cast<size_t>(item)].dtype) {
      malformed("a tensor is not of its item's dtype", row);
    }
    for (size_t i = 0; i < dims; ++i) {
      const bool cut = static_cast<int64_t>(i) == dim;
      local.narrow(i, cut ? start : 0, cut ? length : local.chunk()[i]);
    }
    made.rows.push_back(local.dtype());
    made.rows.push_back(local.address());
    made.rows.push_back(static_cast<int64_t>(dims));
    append(made.rows, local.chunk());
    if (dim >= 0) made.rows[made.rows.size() - dims + static_cast<size_t>(dim)] = length;
    append(made.rows, local.strides());
    made.devices.push_back(local.device());
  }
  return made;
}

std::vector<uint8_t> ready_rows(const StateTables& state, std::span<const int64_t> local_plan) {
  if (local_plan.size() % kLocalPlanRow != 0) malformed("a local plan is malformed");
  std::vector<uint8_t> ready;
  ready.reserve(local_plan.size() / kLocalPlanRow);
  for (size_t at = 0; at < local_plan.size(); at += kLocalPlanRow) {
    if (is_object(state, local_plan[at])) continue;
    if (local_plan[at] < 0 || static_cast<uint64_t>(local_plan[at]) >= state.sources.size()) {
      malformed("no such item", static_cast<int64_t>(at / kLocalPlanRow));
    }
    const int64_t tensor = state.sources[static_cast<size_t>(local_plan[at])][0];
    ready.push_back(static_cast<uint8_t>(state.ready[static_cast<size_t>(tensor)]));
  }
  return ready;
}

FillTable make_read_table(const StateTables& state, std::span<const int64_t> reads) {
  return fill_table(state, reads, kReadHead, 0, [](auto head, auto, const auto& local, int64_t number, auto& table) {
    if (local.dtype() != head[5]) malformed("a tensor is not of the stored dtype", number);
    append(table, head.subspan(1));
    return true;
  });
}

int64_t address_in(std::span<const std::byte> memory, int64_t offset, int64_t dtype, std::span<const int64_t> sizes,
                   int64_t row) {
  if (dtype < 0 || static_cast<uint64_t>(dtype) >= format::dtypes().size()) throw Error::invalid("no such dtype", row);
  const uint64_t bytes = format::tensor_bytes(format::dtypes()[static_cast<size_t>(dtype)], sizes);
  const auto begin = static_cast<uint64_t>(offset);
  if (offset < 0 || begin > memory.size() || bytes > memory.size() - begin) {
    throw Error::invalid("a row of a round leaves the round's memory", row);
  }
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(memory.data()) + begin);
}

FillTable make_place_table(const StateTables& state, std::span<const int64_t> places,
                           std::span<const int64_t> memories) {
  std::map<int64_t, std::span<const std::byte>> memory_of;
  if (memories.size() % kMemoryRow != 0) malformed("a table of memories is malformed");
  for (size_t at = 0; at < memories.size(); at += kMemoryRow) {
    const auto* address = reinterpret_cast<const std::byte*>(static_cast<uintptr_t>(memories[at + 1]));
    memory_of[memories[at]] = {address, static_cast<size_t>(memories[at + 2])};
  }
  return fill_table(state, places, kPlaceHead, 2,
                    [&](auto head, auto sizes, const auto& local, int64_t number, auto& table) {
                      const auto memory = memory_of.find(head[0]);
                      if (memory == memory_of.end()) malformed("a place is in no memory", number);
                      if (local.dtype() != head[3]) return false;
                      const int64_t address = address_in(memory->second, head[1], local.dtype(), sizes, number);
                      table.insert(table.end(), {local.dtype(), address, head[4]});
                      return true;
                    });
}

std::optional<DescribedState> describe_state(std::span<const std::string> names, const TensorTable& tensors,
                                             std::span<const std::byte> requires_grad, std::span<const size_t> objects,
                                             int64_t node) {
  if (requires_grad.size() != tensors.size() || names.size() != tensors.size() + objects.size()) {
    throw Error::invalid("expected as many names as tensors and objects");
  }
  InventoryBuilder builder;
  std::vector<int64_t> sources;
  sources.reserve(4 * names.size());
  size_t object = 0;
  for (size_t position = 0; position < names.size(); ++position) {
    if (object < objects.size() && objects[object] == position) {
      ++object;
      Item item;
      item.name = names[position];
      builder.add(item);
      add_source(-1, 0, sources);
      continue;
    }
    const size_t number = position - object;
    if (number >= tensors.size()) throw Error::invalid("objects are not in the order of the names");
    const LocalTensor tensor = tensors[number];
    if (tensor.dtype < 0) return std::nullopt;
    builder.add(item_of(tensor, requires_grad[number], names[position]));
    add_source(static_cast<int64_t>(number), tensor.shape.size(), sources);
  }
  return DescribedState{builder.pack(node), std::move(sources)};
}

std::vector<std::vector<int64_t>> rows_of_tensors(const TensorTable& tensors,
                                                  std::span<const std::byte> requires_grad) {
  if (requires_grad.size() > tensors.size()) throw Error::invalid("more flags than tensors");
  std::vector<std::vector<int64_t>> rows(requires_grad.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    const LocalTensor tensor = tensors[i];
    if (tensor.dtype >= 0) pack_row(item_of(tensor, requires_grad[i], {}), rows[i]);
  }
  return rows;
}

}  // namespace vescale_ckpt::state
