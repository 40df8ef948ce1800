#include "device/cuda_api.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>

namespace vescale_ckpt::device::cuda {

namespace {

constexpr const char* kRuntimes[] = {"libcudart.so.13", "libcudart.so.12"};
constexpr const char* kDriver = "libcuda.so.1";

enum class Home { runtime, driver };

// A function of Api, and its name.
struct Function {
  size_t place;  // in Api
  const char* name;
  Home home = Home::runtime;
};

constexpr Function kFunctions[] = {
    {offsetof(Api, get_device_count), "cudaGetDeviceCount"},
    {offsetof(Api, device_attribute), "cudaDeviceGetAttribute"},
    {offsetof(Api, pci_address), "cudaDeviceGetPCIBusId"},
    {offsetof(Api, runtime_version), "cudaRuntimeGetVersion"},
    {offsetof(Api, driver_version), "cudaDriverGetVersion"},
    {offsetof(Api, get_last_error), "cudaGetLastError"},
    {offsetof(Api, error_name), "cudaGetErrorName"},
    {offsetof(Api, error_string), "cudaGetErrorString"},
    {offsetof(Api, stream_priorities), "cudaDeviceGetStreamPriorityRange"},
    {offsetof(Api, stream_create), "cudaStreamCreateWithPriority"},
    {offsetof(Api, stream_destroy), "cudaStreamDestroy"},
    {offsetof(Api, stream_synchronize), "cudaStreamSynchronize"},
    {offsetof(Api, stream_wait_event), "cudaStreamWaitEvent"},
    {offsetof(Api, stream_is_captured), "cudaStreamIsCapturing"},
    {offsetof(Api, exchange_capture_mode), "cudaThreadExchangeStreamCaptureMode"},
    {offsetof(Api, event_create), "cudaEventCreateWithFlags"},
    {offsetof(Api, event_destroy), "cudaEventDestroy"},
    {offsetof(Api, event_record), "cudaEventRecord"},
    {offsetof(Api, event_synchronize), "cudaEventSynchronize"},
    {offsetof(Api, copy), "cudaMemcpyAsync"},
    {offsetof(Api, copy_2d), "cudaMemcpy2DAsync"},
    {offsetof(Api, allocate), "cudaMalloc"},
    {offsetof(Api, release), "cudaFree"},
    {offsetof(Api, host_allocate), "cudaHostAlloc"},
    {offsetof(Api, host_release), "cudaFreeHost"},
    {offsetof(Api, host_register), "cudaHostRegister"},
    {offsetof(Api, host_unregister), "cudaHostUnregister"},
    {offsetof(Api, clear), "cudaMemsetAsync"},
    {offsetof(Api, device_get), "cuDeviceGet", Home::driver},
    {offsetof(Api, context_retain), "cuDevicePrimaryCtxRetain", Home::driver},
    {offsetof(Api, context_release), "cuDevicePrimaryCtxRelease_v2", Home::driver},
    {offsetof(Api, context_push), "cuCtxPushCurrent_v2", Home::driver},
    {offsetof(Api, context_pop), "cuCtxPopCurrent_v2", Home::driver},
    {offsetof(Api, module_load), "cuModuleLoadData", Home::driver},
    {offsetof(Api, module_function), "cuModuleGetFunction", Home::driver},
    {offsetof(Api, module_unload), "cuModuleUnload", Home::driver},
    {offsetof(Api, launch), "cuLaunchKernel", Home::driver},
};

// Returns whether the library has the function.
bool find(void* library, const char* name, size_t place, Api& api) {
  void* const function = ::dlsym(library, name);
  std::memcpy(reinterpret_cast<std::byte*>(&api) + place, &function, sizeof(function));
  return function != nullptr;
}

void find_batch(void* library, Api& api) {
  int version = 0;
  if (api.runtime_version(&version) != kSuccess || version < kFirstWithBatches) return;
  find(library, "cudaMemcpyBatchAsync", version >= 13000 ? offsetof(Api, copy_batch_13) : offsetof(Api, copy_batch_12),
       api);
}

}  // namespace

// Libraries stay loaded, because the framework uses them, too.
std::vector<void*> runtimes(bool loaded) {
  std::vector<void*> found;
  for (const char* name : kRuntimes) {
    void* const library = ::dlopen(name, RTLD_NOW | RTLD_LOCAL | (loaded ? RTLD_NOLOAD : 0));
    if (library != nullptr && std::ranges::find(found, library) == found.end()) found.push_back(library);
  }
  return found;
}

bool load(void* runtime, Api& api, std::string& reason) {
  api = {};
  void* const driver = ::dlopen(kDriver, RTLD_NOW | RTLD_LOCAL);
  if (driver == nullptr) {
    reason.assign("no CUDA driver: ").append(kDriver).append(" is not found");
    return false;
  }
  std::string missing;
  for (const Function& function : kFunctions) {
    void* const library = function.home == Home::driver ? driver : runtime;
    if (!find(library, function.name, function.place, api)) {
      missing += std::string(missing.empty() ? "" : ", ") + function.name;
    }
  }
  if (!missing.empty()) {
    reason = "the CUDA that is loaded has no " + missing;
    return false;
  }
  find_batch(runtime, api);
  return true;
}

}  // namespace vescale_ckpt::device::cuda
