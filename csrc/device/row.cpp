#include "device/row.h"

#include <algorithm>
#include <string>

#include "base/error.h"

namespace vescale_ckpt::device {

DeviceRow::DeviceRow(DeviceAddress device, std::byte* host, uint32_t item_bytes, std::span<const int64_t> sizes,
                     std::span<const int64_t> strides)
    : device(device), host(host), bytes(item_bytes), run(item_bytes) {
  for (size_t dim = sizes.size(); dim-- > 0;) {
    const auto count = static_cast<uint64_t>(sizes[dim]);
    if (sizes[dim] < 0 || __builtin_mul_overflow(bytes, count, &bytes)) {
      throw Error::invalid("a size of " + std::to_string(sizes[dim]) + " in dimension " + std::to_string(dim));
    }
    if (count == 1) continue;
    int64_t stride = 0;
    if (__builtin_mul_overflow(strides[dim], static_cast<int64_t>(item_bytes), &stride)) {
      throw Error::invalid("a stride of " + std::to_string(strides[dim]) + " elements overflows");
    }
    if (dims.empty() && stride == static_cast<int64_t>(run)) {
      run *= count;
    } else if (!dims.empty() &&
               static_cast<uint64_t>(stride) == dims.back().count * static_cast<uint64_t>(dims.back().stride)) {
      dims.back().count *= count;
    } else {
      dims.push_back({count, stride});
    }
  }
  std::reverse(dims.begin(), dims.end());
  if (bytes == 0) dims.clear();
}

DeviceAddress DeviceRow::address_of_run(uint64_t at) const {
  uint64_t index = at / run;
  int64_t offset = 0;
  for (size_t dim = dims.size(); dim-- > 0;) {
    offset += static_cast<int64_t>(index % dims[dim].count) * dims[dim].stride;
    index /= dims[dim].count;
  }
  return device + static_cast<uint64_t>(offset);
}

}  // namespace vescale_ckpt::device
