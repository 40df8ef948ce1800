#include "state/shared_memory.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "format/torch_record.h"

namespace vescale_ckpt::state {
namespace {

struct Area {
  int64_t device, begin, end;  // addresses
  size_t item;
};

}  // namespace

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

bool are_dense_and_apart(const TensorTable& tensors) {
  std::vector<Area> areas;
  areas.reserve(tensors.size());
  for (size_t number = 0; number < tensors.size(); ++number) {
    const LocalTensor tensor = tensors[number];
    if (tensor.device < 0 || tensor.dtype < 0 || !format::contiguous(tensor.shape, tensor.strides)) return false;
    const uint64_t bytes = format::tensor_bytes(format::dtypes()[static_cast<size_t>(tensor.dtype)], tensor.shape);
    if (bytes != 0) {
      areas.push_back({tensor.device, tensor.address, tensor.address + static_cast<int64_t>(bytes), number});
    }
  }
  std::ranges::sort(areas, {}, [](const Area& area) { return std::pair(area.device, area.begin); });
  return std::ranges::adjacent_find(areas, [](const Area& area, const Area& next) {
           return area.device == next.device && next.begin < area.end;
         }) == areas.end();
}

}  // namespace vescale_ckpt::state
