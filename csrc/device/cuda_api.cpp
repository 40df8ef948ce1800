#include "device/cuda_api.h"

#include <dlfcn.h>

namespace vescale_ckpt::device::cuda {
namespace {

constexpr const char* kRuntimes[] = {"libcudart.so.13", "libcudart.so.12"};

template <typename Function>
bool find(void* library, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(::dlsym(library, name));
  return function != nullptr;
}

void find_batch(void* library, Api& api) {
  int version = 0;
  if (api.runtime_version(&version) != kSuccess) return;
  if (version >= 13000) {
    find(library, "cudaMemcpyBatchAsync", api.copy_batch_13);
  } else if (version >= kFirstWithBatches) {
    find(library, "cudaMemcpyBatchAsync", api.copy_batch_12);
  }
}

}  // namespace

// Libraries stay loaded, because the framework uses them, too.
std::vector<void*> runtimes(bool loaded) {
  std::vector<void*> found;
  for (const char* name : kRuntimes) {
    if (void* library = ::dlopen(name, RTLD_NOW | RTLD_LOCAL | (loaded ? RTLD_NOLOAD : 0))) found.push_back(library);
  }
  return found;
}

bool load(void* runtime, Api& api, std::string& reason) {
  api = {};
  void* const driver = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (driver == nullptr) {
    reason = "no CUDA driver: libcuda.so.1 is not found";
    return false;
  }
  void* library = runtime;
  std::string missing;
  const auto need = [&](const char* name, auto& function) {
    if (!find(library, name, function)) missing += std::string(missing.empty() ? "" : ", ") + name;
  };
  need("cudaGetDeviceCount", api.get_device_count);
  need("cudaDeviceGetAttribute", api.device_attribute);
  need("cudaDeviceGetPCIBusId", api.pci_address);
  need("cudaRuntimeGetVersion", api.runtime_version);
  need("cudaDriverGetVersion", api.driver_version);
  need("cudaGetLastError", api.get_last_error);
  need("cudaGetErrorName", api.error_name);
  need("cudaGetErrorString", api.error_string);
  need("cudaDeviceGetStreamPriorityRange", api.stream_priorities);
  need("cudaStreamCreateWithPriority", api.stream_create);
  need("cudaStreamDestroy", api.stream_destroy);
  need("cudaStreamSynchronize", api.stream_synchronize);
  need("cudaStreamWaitEvent", api.stream_wait_event);
  need("cudaStreamIsCapturing", api.stream_is_captured);
  need("cudaThreadExchangeStreamCaptureMode", api.exchange_capture_mode);
  need("cudaEventCreateWithFlags", api.event_create);
  need("cudaEventDestroy", api.event_destroy);
  need("cudaEventRecord", api.event_record);
  need("cudaEventSynchronize", api.event_synchronize);
  need("cudaMemcpyAsync", api.copy);
  need("cudaMemcpy2DAsync", api.copy_2d);
  need("cudaMalloc", api.allocate);
  need("cudaFree", api.release);
  need("cudaHostAlloc", api.host_allocate);
  need("cudaFreeHost", api.host_release);
  need("cudaHostRegister", api.host_register);
  need("cudaHostUnregister", api.host_unregister);
  library = driver;
  need("cuDeviceGet", api.device_get);
  need("cuDeviceGetName", api.device_name);
  need("cuDevicePrimaryCtxRetain", api.context_retain);
  need("cuDevicePrimaryCtxRelease_v2", api.context_release);
  need("cuCtxPushCurrent_v2", api.context_push);
  need("cuCtxPopCurrent_v2", api.context_pop);
  need("cuModuleLoadData", api.module_load);
  need("cuModuleGetFunction", api.module_function);
  need("cuModuleUnload", api.module_unload);
  need("cuLaunchKernel", api.launch);
  if (!missing.empty()) {
    reason = "the CUDA that is loaded has no " + missing;
    return false;
  }
  find(runtime, "cudaGetDevice", api.current_device);
  find(runtime, "cudaMemsetAsync", api.clear);
  find_batch(runtime, api);
  return true;
}

}  // namespace vescale_ckpt::device::cuda
