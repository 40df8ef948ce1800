#include "device/cuda_api.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>

namespace vescale_ckpt::device::cuda {

namespace {

const Platform kCuda{"CUDA", {"libcudart.so.13", "libcudart.so.12"}, "libcuda.so.1"};
const Platform kHip{"HIP", {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"}, nullptr};

enum class Home { runtime, driver };
enum class Need { always, if_there };

// A function of Api, and its names. nullptr: the platform does not use it.
struct Function {
  size_t place;  // in Api
  const char* cuda;
  const char* hip;
  Home home = Home::runtime;
  Need need = Need::always;
};

constexpr Function kFunctions[] = {
    {offsetof(Api, get_device_count), "cudaGetDeviceCount", "hipGetDeviceCount"},
    {offsetof(Api, device_attribute), "cudaDeviceGetAttribute", "hipDeviceGetAttribute"},
    {offsetof(Api, pci_address), "cudaDeviceGetPCIBusId", "hipDeviceGetPCIBusId"},
    {offsetof(Api, runtime_version), "cudaRuntimeGetVersion", "hipRuntimeGetVersion"},
    {offsetof(Api, driver_version), "cudaDriverGetVersion", "hipDriverGetVersion"},
    {offsetof(Api, get_last_error), "cudaGetLastError", "hipGetLastError"},
    {offsetof(Api, error_name), "cudaGetErrorName", "hipGetErrorName"},
    {offsetof(Api, error_string), "cudaGetErrorString", "hipGetErrorString"},
    {offsetof(Api, stream_priorities), "cudaDeviceGetStreamPriorityRange", "hipDeviceGetStreamPriorityRange"},
    {offsetof(Api, stream_create), "cudaStreamCreateWithPriority", "hipStreamCreateWithPriority"},
    {offsetof(Api, stream_destroy), "cudaStreamDestroy", "hipStreamDestroy"},
    {offsetof(Api, stream_synchronize), "cudaStreamSynchronize", "hipStreamSynchronize"},
    {offsetof(Api, stream_wait_event), "cudaStreamWaitEvent", "hipStreamWaitEvent"},
    {offsetof(Api, stream_is_captured), "cudaStreamIsCapturing", "hipStreamIsCapturing"},
    {offsetof(Api, exchange_capture_mode), "cudaThreadExchangeStreamCaptureMode", "hipThreadExchangeStreamCaptureMode"},
    {offsetof(Api, event_create), "cudaEventCreateWithFlags", "hipEventCreateWithFlags"},
    {offsetof(Api, event_destroy), "cudaEventDestroy", "hipEventDestroy"},
    {offsetof(Api, event_record), "cudaEventRecord", "hipEventRecord"},
    {offsetof(Api, event_synchronize), "cudaEventSynchronize", "hipEventSynchronize"},
    {offsetof(Api, copy), "cudaMemcpyAsync", "hipMemcpyAsync"},
    {offsetof(Api, copy_2d), "cudaMemcpy2DAsync", "hipMemcpy2DAsync"},
    {offsetof(Api, allocate), "cudaMalloc", "hipMalloc"},
    {offsetof(Api, release), "cudaFree", "hipFree"},
    {offsetof(Api, host_allocate), "cudaHostAlloc", "hipHostMalloc"},
    {offsetof(Api, host_release), "cudaFreeHost", "hipHostFree"},
    {offsetof(Api, host_register), "cudaHostRegister", "hipHostRegister"},
    {offsetof(Api, host_unregister), "cudaHostUnregister", "hipHostUnregister"},
    {offsetof(Api, set_device), nullptr, "hipSetDevice"},
    {offsetof(Api, current_device), nullptr, "hipGetDevice"},
    {offsetof(Api, current_device), "cudaGetDevice", nullptr, Home::runtime, Need::if_there},
    {offsetof(Api, clear), "cudaMemsetAsync", nullptr, Home::runtime, Need::if_there},
    {offsetof(Api, device_get), "cuDeviceGet", "hipDeviceGet", Home::driver},
    {offsetof(Api, device_name), "cuDeviceGetName", "hipDeviceGetName", Home::driver},
    {offsetof(Api, context_retain), "cuDevicePrimaryCtxRetain", nullptr, Home::driver},
    {offsetof(Api, context_release), "cuDevicePrimaryCtxRelease_v2", nullptr, Home::driver},
    {offsetof(Api, context_push), "cuCtxPushCurrent_v2", nullptr, Home::driver},
    {offsetof(Api, context_pop), "cuCtxPopCurrent_v2", nullptr, Home::driver},
    {offsetof(Api, module_load), "cuModuleLoadData", nullptr, Home::driver},
    {offsetof(Api, module_function), "cuModuleGetFunction", nullptr, Home::driver},
    {offsetof(Api, module_unload), "cuModuleUnload", nullptr, Home::driver},
    {offsetof(Api, launch), "cuLaunchKernel", nullptr, Home::driver},
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
std::vector<Runtime> runtimes(bool loaded) {
  std::vector<Runtime> found;
  for (const Platform* platform : {&kCuda, &kHip}) {
    if (platform == &kHip && !loaded) continue;
    for (const char* name : platform->runtimes) {
      void* const library = ::dlopen(name, RTLD_NOW | RTLD_LOCAL | (loaded ? RTLD_NOLOAD : 0));
      if (library != nullptr && std::ranges::find(found, library, &Runtime::library) == found.end()) {
        found.push_back({*platform, library});
      }
    }
  }
  return found;
}

bool load(const Runtime& runtime, Api& api, std::string& reason) {
  const Platform& platform = runtime.platform;
  api = {};
  api.platform = platform.name;
  void* const driver = platform.driver == nullptr ? runtime.library : ::dlopen(platform.driver, RTLD_NOW | RTLD_LOCAL);
  if (driver == nullptr) {
    reason = std::string("no ") + platform.name + " driver: " + platform.driver + " is not found";
    return false;
  }
  std::string missing;
  for (const Function& function : kFunctions) {
    const char* const name = &platform == &kHip ? function.hip : function.cuda;
    if (name == nullptr) continue;
    void* const library = function.home == Home::driver ? driver : runtime.library;
    if (!find(library, name, function.place, api) && function.need == Need::always) {
      missing += std::string(missing.empty() ? "" : ", ") + name;
    }
  }
  if (!missing.empty()) {
    reason = std::string("the ") + platform.name + " that is loaded has no " + missing;
    return false;
  }
  if (&platform == &kCuda) find_batch(runtime.library, api);
  return true;
}

}  // namespace vescale_ckpt::device::cuda
