// What of a snapshot is copied from accelerators.
#pragma once

#include <map>
#include <optional>
#include <vector>

#include "stage/device_pipelines.h"

namespace vescale_ckpt::stage {

// A stream whose work, as far as it is queued when the copy starts, comes before it.
struct Producer {
  int device;
  device::StreamHandle stream;
};

// One thread at a time.
class DevicePart {
 public:
  DevicePart(DevicePipelines* pipelines, std::vector<Producer> producers, device::CopyControl& control);

  void add(int device, device::DeviceRow row);

  // Starts the copies if they are not yet. Waits for pipelines that others use, or if not asked to wait, leaves it to
  // the next call. Throws Error(device), with some copies under way perhaps: finish() is needed all the same.
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
