#include "fakes/fake_runtime.h"

#include <gtest/gtest.h>

#include "fakes/fake_cuda.cpp"  // a library of its own for Python

namespace vescale_ckpt::device {
namespace {

constexpr unsigned char kImage[1] = {};

const cuda::Api& fake_api() {
  static const cuda::Api api = {
      .get_device_count = cudaGetDeviceCount,
      .device_attribute = cudaDeviceGetAttribute,
      .pci_address = cudaDeviceGetPCIBusId,
      .runtime_version = cudaRuntimeGetVersion,
      .driver_version = cudaDriverGetVersion,
      .get_last_error = cudaGetLastError,
      .error_name = cudaGetErrorName,
      .error_string = cudaGetErrorString,
      .stream_priorities = cudaDeviceGetStreamPriorityRange,
      .stream_create = cudaStreamCreateWithPriority,
      .stream_destroy = cudaStreamDestroy,
      .stream_synchronize = cudaStreamSynchronize,
      .stream_wait_event = cudaStreamWaitEvent,
      .stream_is_captured = cudaStreamIsCapturing,
      .exchange_capture_mode = cudaThreadExchangeStreamCaptureMode,
      .event_create = cudaEventCreateWithFlags,
      .event_destroy = cudaEventDestroy,
      .event_record = cudaEventRecord,
      .event_synchronize = cudaEventSynchronize,
      .copy = cudaMemcpyAsync,
      .copy_2d = cudaMemcpy2DAsync,
      .allocate = cudaMalloc,
      .release = cudaFree,
      .host_allocate = cudaHostAlloc,
      .host_release = cudaFreeHost,
      .host_register = cudaHostRegister,
      .host_unregister = cudaHostUnregister,
      .clear = cudaMemsetAsync,
      .copy_batch_12 = nullptr,
      .copy_batch_13 = nullptr,  // Python's tests have it
      .device_get = cuDeviceGet,
      .context_retain = cuDevicePrimaryCtxRetain,
      .context_release = cuDevicePrimaryCtxRelease_v2,
      .context_push = cuCtxPushCurrent_v2,
      .context_pop = cuCtxPopCurrent_v2,
      .module_load = cuModuleLoadData,
      .module_function = cuModuleGetFunction,
      .module_unload = cuModuleUnload,
      .launch = cuLaunchKernel,
  };
  return api;
}

}  // namespace

FakeRuntime::FakeRuntime(bool kernels)
    : cuda_((fake_reset(), std::make_unique<CudaRuntime>(fake_api(), kernels ? kImage : nullptr))) {}

FakeRuntime::~FakeRuntime() {
  EXPECT_EQ(count("calls without a device"), 0u);
  const std::lock_guard lock(state.mutex);
  for (const DeviceAddress address : allocations_) state.allocations.erase(address);
}

DeviceAddress FakeRuntime::allocate(int device, uint64_t bytes, std::byte fill) {
  memory_.emplace_back(new std::byte[bytes]);
  std::memset(memory_.back().get(), static_cast<int>(fill), bytes);
  allocations_.push_back(tagged(memory_.back().get(), device));
  ::allocate(allocations_.back(), bytes);
  return allocations_.back();
}

std::byte* FakeRuntime::memory(DeviceAddress address) const {
  return behind(address);
}

StreamHandle FakeRuntime::make_producer() {
  producers_.push_back(std::make_unique<FakeQueue>());
  return reinterpret_cast<StreamHandle>(producers_.back().get());
}

FakeQueue& FakeRuntime::producer(int device, StreamHandle handle) {
  return handle == 0 ? state.default_streams[device] : *reinterpret_cast<FakeQueue*>(handle);
}

void FakeRuntime::fail(const std::string& call, uint64_t skip, int code) {
  faults_ = count("faults");
  fake_fail(call.c_str(), static_cast<int64_t>(skip), code);
}

void FakeRuntime::heal() {
  fake_heal();
}

uint64_t FakeRuntime::count(const std::string& name) const {
  return fake_count(name.c_str());
}

}  // namespace vescale_ckpt::device
