// A tensor, or a part of one: on a device with any strides, and on the host dense in row-major order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "device/device.h"

namespace vescale_ckpt::device {

struct DeviceRow {
  // Strides are in elements. Throws Error(invalid) for a negative size or an overflow.
  DeviceRow(DeviceAddress device, std::byte* host, uint32_t item_bytes, std::span<const int64_t> sizes,
            std::span<const int64_t> strides);

  // Returns the address of the run that holds byte `at` of the dense order.
  DeviceAddress address_of_run(uint64_t at) const;

  DeviceAddress device;  // address of the first element
  std::byte* host;
  uint64_t bytes;
  uint64_t run;               // contiguous bytes on the device
  std::vector<PackDim> dims;  // dimensions of runs, outermost first; empty if the row is one run
};

}  // namespace vescale_ckpt::device
