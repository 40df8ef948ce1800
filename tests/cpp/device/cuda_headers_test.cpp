// Holds what csrc/device/cuda_api.h declares by hand against CUDA's own headers, where there are any.
#include <gtest/gtest.h>

#include "device/cuda_api.h"

#if __has_include(<cuda.h>) && __has_include(<cuda_runtime_api.h>)

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <type_traits>

namespace vescale_ckpt::device::cuda {
namespace {

// Passed alike: pointers and handles as pointers, enums and numbers of one size.
template <typename Ours, typename Theirs>
constexpr bool passes_as() {
  constexpr bool numbers =
      (std::is_integral_v<Ours> || std::is_enum_v<Ours>) && (std::is_integral_v<Theirs> || std::is_enum_v<Theirs>);
  constexpr bool pointers = std::is_pointer_v<Ours> && std::is_pointer_v<Theirs>;
  if constexpr (pointers) {
    using OursTo = std::remove_cv_t<std::remove_pointer_t<Ours>>;
    using TheirsTo = std::remove_cv_t<std::remove_pointer_t<Theirs>>;
    if constexpr (std::is_void_v<OursTo> || std::is_void_v<TheirsTo> || std::is_class_v<OursTo>) {
      return true;  // handles are opaque; structures are compared below
    } else {
      return passes_as<OursTo, TheirsTo>();
    }
  }
  return numbers && sizeof(Ours) == sizeof(Theirs);
}

template <typename Ours, typename Theirs>
struct SameCall : std::false_type {};
template <typename OurResult, typename TheirResult, typename... Ours, typename... Theirs>
  requires(sizeof...(Ours) == sizeof...(Theirs))
struct SameCall<OurResult (*)(Ours...), TheirResult (*)(Theirs...)>
    : std::bool_constant<passes_as<OurResult, TheirResult>() && (passes_as<Ours, Theirs>() && ...)> {};

#define VESCALE_CKPT_SAME(ours, theirs) \
  static_assert(SameCall<decltype(Api::ours), decltype(&::theirs)>::value, #theirs " has another signature")

VESCALE_CKPT_SAME(get_device_count, cudaGetDeviceCount);
VESCALE_CKPT_SAME(clear, cudaMemsetAsync);
VESCALE_CKPT_SAME(device_attribute, cudaDeviceGetAttribute);
VESCALE_CKPT_SAME(stream_is_captured, cudaStreamIsCapturing);
VESCALE_CKPT_SAME(pci_address, cudaDeviceGetPCIBusId);
VESCALE_CKPT_SAME(runtime_version, cudaRuntimeGetVersion);
VESCALE_CKPT_SAME(driver_version, cudaDriverGetVersion);
VESCALE_CKPT_SAME(get_last_error, cudaGetLastError);
VESCALE_CKPT_SAME(error_name, cudaGetErrorName);
VESCALE_CKPT_SAME(error_string, cudaGetErrorString);
VESCALE_CKPT_SAME(stream_priorities, cudaDeviceGetStreamPriorityRange);
VESCALE_CKPT_SAME(stream_create, cudaStreamCreateWithPriority);
VESCALE_CKPT_SAME(stream_destroy, cudaStreamDestroy);
VESCALE_CKPT_SAME(stream_synchronize, cudaStreamSynchronize);
VESCALE_CKPT_SAME(exchange_capture_mode, cudaThreadExchangeStreamCaptureMode);
VESCALE_CKPT_SAME(event_destroy, cudaEventDestroy);
VESCALE_CKPT_SAME(event_synchronize, cudaEventSynchronize);
VESCALE_CKPT_SAME(copy, cudaMemcpyAsync);
VESCALE_CKPT_SAME(copy_2d, cudaMemcpy2DAsync);
VESCALE_CKPT_SAME(release, cudaFree);
VESCALE_CKPT_SAME(host_release, cudaFreeHost);
VESCALE_CKPT_SAME(host_register, cudaHostRegister);
VESCALE_CKPT_SAME(host_unregister, cudaHostUnregister);
VESCALE_CKPT_SAME(device_get, cuDeviceGet);
VESCALE_CKPT_SAME(context_retain, cuDevicePrimaryCtxRetain);
VESCALE_CKPT_SAME(context_release, cuDevicePrimaryCtxRelease);
VESCALE_CKPT_SAME(context_push, cuCtxPushCurrent);
VESCALE_CKPT_SAME(context_pop, cuCtxPopCurrent);
VESCALE_CKPT_SAME(module_load, cuModuleLoadData);
VESCALE_CKPT_SAME(module_function, cuModuleGetFunction);
VESCALE_CKPT_SAME(module_unload, cuModuleUnload);
VESCALE_CKPT_SAME(launch, cuLaunchKernel);
// Those with C++ overloads of the same name, or with default arguments, are named by their full type.
#define VESCALE_CKPT_SAME_AS(ours, theirs, ...) \
  static_assert(SameCall<decltype(Api::ours), decltype(static_cast<__VA_ARGS__>(&::theirs))>::value, #theirs)
VESCALE_CKPT_SAME_AS(stream_wait_event, cudaStreamWaitEvent, cudaError_t (*)(cudaStream_t, cudaEvent_t, unsigned));
VESCALE_CKPT_SAME_AS(event_create, cudaEventCreateWithFlags, cudaError_t (*)(cudaEvent_t*, unsigned));
VESCALE_CKPT_SAME_AS(event_record, cudaEventRecord, cudaError_t (*)(cudaEvent_t, cudaStream_t));
VESCALE_CKPT_SAME_AS(allocate, cudaMalloc, cudaError_t (*)(void**, size_t));
VESCALE_CKPT_SAME_AS(host_allocate, cudaHostAlloc, cudaError_t (*)(void**, size_t, unsigned));
#if CUDART_VERSION >= 13000
VESCALE_CKPT_SAME(copy_batch_13, cudaMemcpyBatchAsync);
#elif CUDART_VERSION >= 12080
VESCALE_CKPT_SAME(copy_batch_12, cudaMemcpyBatchAsync);
#endif

#if CUDART_VERSION >= 12080
static_assert(sizeof(Location) == sizeof(cudaMemLocation) && offsetof(Location, id) == offsetof(cudaMemLocation, id));
static_assert(sizeof(CopyAttributes) == sizeof(cudaMemcpyAttributes));
static_assert(offsetof(CopyAttributes, source) == offsetof(cudaMemcpyAttributes, srcLocHint));
static_assert(offsetof(CopyAttributes, destination) == offsetof(cudaMemcpyAttributes, dstLocHint));
static_assert(offsetof(CopyAttributes, flags) == offsetof(cudaMemcpyAttributes, flags));
static_assert(kAccessInStreamOrder == cudaMemcpySrcAccessOrderStream);
static_assert(kPreferOverlapWithCompute == cudaMemcpyFlagPreferOverlapWithCompute);
static_assert(kLocationDevice == cudaMemLocationTypeDevice && kLocationHost == cudaMemLocationTypeHost);
#endif

static_assert(kSuccess == cudaSuccess && kOutOfMemory == cudaErrorMemoryAllocation);
static_assert(kToDevice == cudaMemcpyHostToDevice && kToHost == cudaMemcpyDeviceToHost);
static_assert(kStreamNonBlocking == cudaStreamNonBlocking && kHostPortable == cudaHostRegisterPortable);
static_assert(kHostPortable == cudaHostAllocPortable);
static_assert(kEventBlockingSync == cudaEventBlockingSync && kEventDisableTiming == cudaEventDisableTiming);
static_assert(kCaptureRelaxed == cudaStreamCaptureModeRelaxed);
static_assert(kNotCaptured == cudaStreamCaptureStatusNone);
static_assert(kRegisteredMemoryAsItIs == cudaDevAttrCanUseHostPointerForRegisteredMem);
static_assert(kNeedsNewerDriver == cudaErrorCallRequiresNewerDriver && kNotSupported == cudaErrorNotSupported);

// The check itself sees a parameter too many, one of another size, and a pointer in place of a number.
static_assert(!SameCall<int (*)(void*, size_t), decltype(&::cudaFree)>::value);
static_assert(!SameCall<int (*)(int), decltype(&::cudaEventDestroy)>::value);
static_assert(!SameCall<int (*)(void*, int, unsigned), decltype(&::cudaHostRegister)>::value);

TEST(CudaHeaders, AgreeWithOurDeclarations) {}  // what can fail has failed to compile

}  // namespace
}  // namespace vescale_ckpt::device::cuda

#else

TEST(CudaHeaders, AgreeWithOurDeclarations) {
  GTEST_SKIP() << "no CUDA headers found";
}

#endif
