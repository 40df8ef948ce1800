// One tensor, or part of one, that lies on a device with any strides and densely, in row-major order, on the host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "device/device.h"

namespace vescale_ckpt::device {

struct DeviceRow {
  // Strides are in elements. Throws Error(invalid) for a negative size and what overflows.
  DeviceRow(DeviceAddress device, std::byte* host, uint32_t item_bytes, std::span<const int64_t> sizes,
            std::span<const int64_t> strides);

  // Of the run that holds byte `at` of the dense order.
  DeviceAddress address_of_run(uint64_t at) const;

  DeviceAddress device;  // of the first element
  std::byte* host;
  uint64_t bytes;
  uint64_t run;               // bytes that lie together on the device
  std::vector<PackDim> dims;  // of runs, outermost first; empty if the row is one run
};

}  // namespace vescale_ckpt::device
