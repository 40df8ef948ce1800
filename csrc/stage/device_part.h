// Copies the part of a snapshot that lies on accelerators.
#pragma once

#include <map>
#include <optional>
#include <vector>

#include "stage/device_pipelines.h"

namespace vescale_ckpt::stage {

// A stream of the trainer. Work that is queued in it when the copy starts is done before the copy.
struct Producer {
  int device;
  device::StreamHandle stream;
};

// Not thread-safe. `pipelines` and `control` must outlive it.
class DevicePart {
 public:
  DevicePart(DevicePipelines* pipelines, std::vector<Producer> producers, device::CopyControl& control);

  void add(int device, device::DeviceRow row);

  // Starts the copies if they are not started yet. If the pipelines are in use it waits for them; without
  // `wait_for_pipelines` it starts nothing then. Throws Error(device); finish() must be called even then, because
  // copies may be under way.
  void start(const device::HostLayout& layout, bool wait_for_pipelines);
  // Returns when nothing touches the rows any more. Throws the first error, by which the other devices are cancelled.
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
