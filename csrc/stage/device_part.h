// Copies the part of a snapshot that lies on accelerators.
#pragma once

#include <map>
#include <optional>
#include <vector>

#include "stage/device_pipelines.h"

namespace vescale_ckpt::stage {

// A stream of the trainer. The copy runs after the work that is queued in it when the copy starts.
struct Producer {
  int device;
  device::StreamHandle stream;
};

// Not thread-safe. `pipelines` and `control` must outlive it.
class DevicePart {
 public:
  DevicePart(DevicePipelines* pipelines, std::vector<Producer> producers, device::CopyControl& control);

  void add(int device, device::DeviceRow row);

  // Starts the copies once. Waits for the pipelines if they are in use; without `wait_for_pipelines` it starts nothing
  // then. Throws Error(device). finish() must be called in any case, because copies may run.
  void start(const device::HostLayout& layout, bool wait_for_pipelines);
  // Returns when nothing touches the rows any more. Throws the first error, which cancels the other devices.
  void finish();

 private:
  std::vector<device::StreamHandle> producers_of(int device) const;

  DevicePipelines* const pipelines_;
  const std::vector<Producer> producers_;
  device::CopyControl& control_;
  std::map<int, std::vector<device::DeviceRow>> rows_;
  std::optional<DevicePipelines::Lease> lease_;
  std::vector<device::Pipeline*> started_;
};

}  // namespace vescale_ckpt::stage
