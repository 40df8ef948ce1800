// Holds what csrc/device/cuda_api.h declares by hand against HIP's own headers, where there are any.
#include <gtest/gtest.h>

#include "device/cuda_api.h"
#include "same_call.h"

#if __has_include(<hip/hip_runtime_api.h>)

#ifndef __HIP_PLATFORM_AMD__
#define __HIP_PLATFORM_AMD__ 1
#endif
#include <hip/hip_runtime_api.h>

namespace vescale_ckpt::device::cuda {
namespace {

#define VESCALE_CKPT_SAME(ours, theirs) \
  static_assert(SameCall<decltype(Api::ours), decltype(&::theirs)>::value, #theirs " has another signature")

VESCALE_CKPT_SAME(get_device_count, hipGetDeviceCount);
VESCALE_CKPT_SAME(device_attribute, hipDeviceGetAttribute);
VESCALE_CKPT_SAME(pci_address, hipDeviceGetPCIBusId);
VESCALE_CKPT_SAME(runtime_version, hipRuntimeGetVersion);
VESCALE_CKPT_SAME(driver_version, hipDriverGetVersion);
VESCALE_CKPT_SAME(get_last_error, hipGetLastError);
VESCALE_CKPT_SAME(error_name, hipGetErrorName);
VESCALE_CKPT_SAME(error_string, hipGetErrorString);
VESCALE_CKPT_SAME(stream_priorities, hipDeviceGetStreamPriorityRange);
VESCALE_CKPT_SAME(stream_create, hipStreamCreateWithPriority);
VESCALE_CKPT_SAME(stream_destroy, hipStreamDestroy);
VESCALE_CKPT_SAME(stream_synchronize, hipStreamSynchronize);
VESCALE_CKPT_SAME(stream_wait_event, hipStreamWaitEvent);
VESCALE_CKPT_SAME(stream_is_captured, hipStreamIsCapturing);
VESCALE_CKPT_SAME(exchange_capture_mode, hipThreadExchangeStreamCaptureMode);
VESCALE_CKPT_SAME(event_create, hipEventCreateWithFlags);
VESCALE_CKPT_SAME(event_destroy, hipEventDestroy);
VESCALE_CKPT_SAME(event_record, hipEventRecord);
VESCALE_CKPT_SAME(event_synchronize, hipEventSynchronize);
VESCALE_CKPT_SAME(copy, hipMemcpyAsync);
VESCALE_CKPT_SAME(copy_2d, hipMemcpy2DAsync);
VESCALE_CKPT_SAME(release, hipFree);
VESCALE_CKPT_SAME(host_release, hipHostFree);
VESCALE_CKPT_SAME(host_register, hipHostRegister);
VESCALE_CKPT_SAME(host_unregister, hipHostUnregister);
VESCALE_CKPT_SAME(set_device, hipSetDevice);
VESCALE_CKPT_SAME(current_device, hipGetDevice);
VESCALE_CKPT_SAME(device_get, hipDeviceGet);
VESCALE_CKPT_SAME(device_name, hipDeviceGetName);
// These have C++ overloads of the same name.
static_assert(
    SameCall<decltype(Api::allocate), decltype(static_cast<hipError_t (*)(void**, size_t)>(&hipMalloc))>::value);
static_assert(SameCall<decltype(Api::host_allocate),
                       decltype(static_cast<hipError_t (*)(void**, size_t, unsigned)>(&hipHostMalloc))>::value);

static_assert(kSuccess == hipSuccess && kOutOfMemory == hipErrorOutOfMemory && kNotSupported == hipErrorNotSupported);
static_assert(kToDevice == hipMemcpyHostToDevice && kToHost == hipMemcpyDeviceToHost);
static_assert(kStreamNonBlocking == hipStreamNonBlocking && kHostPortable == hipHostRegisterPortable);
static_assert(kHostPortable == hipHostMallocPortable);
static_assert(kEventBlockingSync == hipEventBlockingSync && kEventDisableTiming == hipEventDisableTiming);
static_assert(kCaptureRelaxed == hipStreamCaptureModeRelaxed && kNotCaptured == hipStreamCaptureStatusNone);
static_assert(hipErrorECCNotCorrectable == 214 && hipErrorIllegalAddress == 700 && hipErrorLaunchFailure == 719);
static_assert(hipErrorPeerAccessAlreadyEnabled == 704 && hipErrorHostMemoryNotRegistered == 713);

TEST(HipHeaders, AgreeWithOurDeclarations) {}  // what can fail has failed to compile

}  // namespace
}  // namespace vescale_ckpt::device::cuda

#else

TEST(HipHeaders, AgreeWithOurDeclarations) {
  GTEST_SKIP() << "no HIP headers found";
}

#endif
