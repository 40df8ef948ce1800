// Copies to accelerators, for the bindings of what fills tensors.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "stage/device_load.h"

namespace vescale_ckpt::bindings {

using Producers = std::vector<std::pair<int, device::StreamHandle>>;  // streams of the trainer, and their devices

// `devices`: of the rows of a table, -1 for host memory. nullptr if all are there. Not to be called with the GIL.
inline std::unique_ptr<stage::DeviceLoad> device_load(std::span<const int64_t> devices, const Producers& producers) {
  if (std::ranges::all_of(devices, [](int64_t device) { return device < 0; })) return nullptr;
  std::vector<stage::Producer> of_devices;
  for (const auto& [device, stream] : producers) of_devices.push_back({device, stream});
  return std::make_unique<stage::DeviceLoad>(stage::cuda_load_streams(), of_devices);
}

// `read` is given what copies to the devices of the rows, and reports. Returns when all copies are done.
template <typename Read>
py::dict read_to_devices(const Table& devices, const Producers& producers, const Read& read) {
  return read_dict(*without_gil([&] {
    const auto to_devices = device_load(devices.values(), producers);
    auto report = read(to_devices.get());
    if (to_devices) to_devices->finish();
    return report;
  }));
}

}  // namespace vescale_ckpt::bindings
