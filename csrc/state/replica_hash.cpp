#include "state/replica_hash.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "format/torch_record.h"

namespace vescale_ckpt::state {
namespace {

[[noreturn]] void malformed_boxes() {
  throw Error::invalid("a table of boxes to compare is malformed");
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

// A box of a tensor, and where its elements are.
struct Box {
  LocalTensor tensor;
  std::span<const int64_t> offset, size;

  int64_t count() const {
    int64_t product = 1;
    for (size_t dim = 0; dim < size.size(); ++dim) {
      const bool inside = offset[dim] >= 0 && size[dim] > 0 && offset[dim] <= tensor.shape[dim] - size[dim];
      if (!inside || __builtin_mul_overflow(product, size[dim], &product)) malformed_boxes();
    }
    return product;
  }

  // Of the element at a position in C's order.
  int64_t address(int64_t position, int64_t item_bytes) const {
    int64_t element = 0;
    for (size_t dim = size.size(); dim-- > 0; position /= size[dim]) {
      element += (offset[dim] + position % size[dim]) * tensor.strides[dim];
    }
    return tensor.address + element * item_bytes;
  }
};

}  // namespace

std::vector<uint64_t> replica_hashes(const TensorTable& tensors, std::span<const int64_t> boxes, uint32_t elements,
                                     std::span<const uint64_t> factors) {
  std::vector<uint64_t> hashes;
  while (!boxes.empty()) {
    if (boxes.size() < 2 || boxes[0] < 0 || static_cast<size_t>(boxes[0]) >= tensors.size()) malformed_boxes();
    const LocalTensor tensor = tensors[static_cast<size_t>(boxes[0])];
    const size_t dims = tensor.shape.size();
    if (boxes[1] != static_cast<int64_t>(dims) || boxes.size() - 2 < 2 * dims) malformed_boxes();
    if (tensor.device != kHostDevice || tensor.dtype < 0) malformed_boxes();
    const Box box{tensor, boxes.subspan(2, dims), boxes.subspan(2 + dims, dims)};
    boxes = boxes.subspan(2 + 2 * dims);

    const int64_t item_bytes = format::dtypes()[static_cast<size_t>(tensor.dtype)].item_bytes;
    const int64_t integers = item_bytes == 16 ? 2 : 1, bytes = item_bytes / integers;
    const int64_t total = box.count(), count = std::min<int64_t>(elements, total);
    if (static_cast<size_t>(count * integers) > factors.size()) malformed_boxes();
    const int64_t step = total / std::max<int64_t>(1, count), first = count > 1 ? step / 2 : 0;
    uint64_t hash = 0;
    for (int64_t i = 0; i < count * integers; ++i) {
      const int64_t from = box.address(first + i / integers * step, item_bytes) + i % integers * bytes;
      int64_t value = integer_at(from, bytes);
      value ^= value >> 31;
      hash += static_cast<uint64_t>(value) * factors[static_cast<size_t>(i)];
    }
    hashes.push_back(hash);
  }
  return hashes;
}

}  // namespace vescale_ckpt::state
