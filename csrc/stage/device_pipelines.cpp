#include "stage/device_pipelines.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include "base/error.h"
#include "device/cuda.h"

namespace vescale_ckpt::stage {
namespace {

// A lock of pages keeps all calls of the device out, and the next one would begin before a call that waits gets its
// turn: on an H200 a launch waited 119 ms, for 64 locks. With this pause behind each lock it waits 5 ms at most.
constexpr std::chrono::microseconds kPauseBetweenLocks{200};

}  // namespace

DevicePipelines::DevicePipelines(device::DeviceRuntime& runtime, const device::CopyLimits& limits)
    : runtime_(runtime), limits_(limits) {}

DevicePipelines::Lease DevicePipelines::borrow(std::span<const int> devices) {
  std::unique_lock lock(mutex_);
  given_back_.wait(lock, [&] { return free_locked(devices); });
  return take_locked(devices);
}

std::optional<DevicePipelines::Lease> DevicePipelines::try_borrow(std::span<const int> devices) {
  const std::lock_guard lock(mutex_);
  if (!free_locked(devices)) return std::nullopt;
  return take_locked(devices);
}

void DevicePipelines::prepare(std::span<const int> devices) {
  for (const int device : devices) {
    if (const auto lease = try_borrow({&device, 1})) lease->pipeline(device).prepare();
  }
}

bool DevicePipelines::free_locked(std::span<const int> devices) const {
  return std::ranges::none_of(devices, [&](int device) { return lent_.contains(device); });
}

DevicePipelines::Lease DevicePipelines::take_locked(std::span<const int> devices) {
  for (const int device : devices) {
    auto& pipeline = pipelines_[device];
    if (!pipeline) pipeline = std::make_unique<device::Pipeline>(runtime_.accelerator(device), limits_);
  }
  lent_.insert(devices.begin(), devices.end());
  return {*this, devices};
}

void DevicePipelines::give_back(std::span<const int> devices) {
  {
    const std::lock_guard lock(mutex_);
    for (const int device : devices) lent_.erase(device);
  }
  given_back_.notify_all();
}

device::Pipeline& DevicePipelines::pipeline(int device) {
  const std::lock_guard lock(mutex_);
  return *pipelines_.at(device);
}

MemoryRegistrar page_locking(device::Accelerator& accelerator) {
  return {[&accelerator](std::byte* address, uint64_t bytes) {
            try {
              accelerator.page_lock({address, bytes});
              std::this_thread::sleep_for(kPauseBetweenLocks);
              return true;
            } catch (const Error& error) {
              device::note("memory of snapshots could not be page-locked, so that copies from devices are slower (" +
                           std::string(error.what()) + ")");
              return false;
            }
          },
          [&accelerator](std::byte* address, uint64_t) {
            try {
              accelerator.page_unlock(address);
            } catch (const Error&) {  // the runtime is shutting down, and has unlocked everything
            }
          }};
}

DevicePipelines& cuda_pipelines(int device) {
  static std::mutex mutex;
  // Leaked on purpose: threads may copy while static destructors run.
  static DevicePipelines* pipelines = nullptr;
  const std::lock_guard lock(mutex);
  if (pipelines != nullptr) return *pipelines;
  std::string reason;
  device::CudaRuntime* const runtime = device::cuda_runtime(reason);
  if (runtime == nullptr) throw Error::invalid(reason);
  snapshot_arena().set_registrar(page_locking(runtime->accelerator(device)));
  return *(pipelines = new DevicePipelines(*runtime));
}

}  // namespace vescale_ckpt::stage
