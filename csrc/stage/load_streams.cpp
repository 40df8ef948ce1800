#include "stage/load_streams.h"

#include <string>
#include <utility>

#include "base/error.h"
#include "device/cuda.h"
#include "device/notes.h"

namespace vescale_ckpt::stage {
namespace {

constexpr uint64_t kSlots = 16;

}  // namespace

LoadStreams::LoadStreams(device::DeviceRuntime& runtime) : runtime_(runtime), slots_(kSlotBytes, kSlots * kSlotBytes) {}

LoadStreams::~LoadStreams() {
  for (const auto& [memory, device] : locked_) {
    try {
      runtime_.accelerator(device).page_unlock(memory);
    } catch (const Error&) {  // the runtime is shutting down, and has unlocked everything
    }
  }
}

std::unique_ptr<LoadStream> LoadStreams::borrow(int device) {
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = idle_.find(device); found != idle_.end()) {
      auto stream = std::move(found->second);
      idle_.erase(found);
      return stream;
    }
  }
  auto stream = std::make_unique<LoadStream>();
  stream->device = device;
  stream->copies = runtime_.accelerator(device).make_stream(device::Priority::normal);
  return stream;
}

void LoadStreams::give_back(std::unique_ptr<LoadStream> stream) {
  const std::lock_guard lock(mutex_);
  const int device = stream->device;
  idle_.emplace(device, std::move(stream));
}

std::unique_ptr<device::Event> LoadStreams::make_event(int device) {
  return runtime_.accelerator(device).make_event();
}

void LoadStreams::lock(int device, std::span<std::byte> memory) {
  {
    const std::lock_guard lock(mutex_);
    if (!tried_.insert(memory.data()).second) return;
  }
  try {
    runtime_.accelerator(device).page_lock(memory);
    const std::lock_guard lock(mutex_);
    locked_[memory.data()] = device;
  } catch (const Error& error) {
    device::note("memory that loads read into could not be page-locked, so that copies to devices are slower (" +
                 std::string(error.what()) + ")");
  }
}

LoadStreams& cuda_load_streams() {
  static std::mutex mutex;
  static LoadStreams* streams = nullptr;  // leaked on purpose: threads may copy while static destructors run
  const std::lock_guard lock(mutex);
  if (streams != nullptr) return *streams;
  std::string reason;
  device::CudaRuntime* const runtime = device::cuda_runtime(reason);
  if (runtime == nullptr) throw Error::invalid(reason);
  return *(streams = new LoadStreams(*runtime));
}

}  // namespace vescale_ckpt::stage
