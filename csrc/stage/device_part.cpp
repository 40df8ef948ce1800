#include "stage/device_part.h"

#include <chrono>
#include <exception>
#include <utility>

#include "base/error.h"

namespace vescale_ckpt::stage {

DevicePart::DevicePart(DevicePipelines* pipelines, std::vector<Producer> producers, device::CopyControl& control)
    : pipelines_(pipelines), producers_(std::move(producers)), control_(control) {}

void DevicePart::add(int device, device::DeviceRow row) {
  if (pipelines_ == nullptr) throw Error::invalid("rows on a device, but no pipelines to copy them");
  rows_[device].push_back(std::move(row));
}

void DevicePart::start(const device::HostLayout& layout, bool wait_for_pipelines) {
  if (rows_.empty() || lease_) return;
  std::vector<int> devices;
  for (const auto& [device, rows] : rows_) devices.push_back(device);
  if (wait_for_pipelines) {
    lease_.emplace(pipelines_->borrow(devices));
  } else if (auto lease = pipelines_->try_borrow(devices)) {
    lease_.emplace(std::move(*lease));
  } else {
    return;
  }
  for (auto& [device, rows] : rows_) {
    device::Pipeline& pipeline = lease_->pipeline(device);
    pipeline.start(std::move(rows), producers_of(device), layout, &control_);
    started_.push_back(&pipeline);
  }
}

void DevicePart::finish() {
  std::exception_ptr first;
  for (device::Pipeline* pipeline : started_) {
    try {
      while (!pipeline->wait(std::chrono::hours(1))) {
      }
    } catch (...) {
      if (!first) first = std::current_exception();
      control_.cancelled = true;
    }
  }
  started_.clear();
  lease_.reset();
  if (first) std::rethrow_exception(first);
}

std::vector<device::StreamHandle> DevicePart::producers_of(int device) const {
  std::vector<device::StreamHandle> streams;
  for (const Producer& producer : producers_) {
    if (producer.device == device) streams.push_back(producer.stream);
  }
  return streams;
}

}  // namespace vescale_ckpt::stage
