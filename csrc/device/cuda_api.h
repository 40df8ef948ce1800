// Finds the functions of CUDA at run time: building needs no toolkit, one binary serves machines with and without it,
// and the engine uses the framework's own runtime. They are declared here without headers; tests/cpp/device compares
// them with CUDA's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace vescale_ckpt::device::cuda {

using Stream = void*;
using EventHandle = void*;
using Context = void*;

inline constexpr int kSuccess = 0, kOutOfMemory = 2, kNeedsNewerDriver = 36, kNotSupported = 801;
inline constexpr int kFirstWithBatches = 12080;    // version CUDA 12.8
inline constexpr int kToDevice = 1, kToHost = 2;   // cudaMemcpyKind
inline constexpr unsigned kStreamNonBlocking = 1;  // does not wait for the default stream
inline constexpr unsigned kEventBlockingSync = 1, kEventDisableTiming = 2;
inline constexpr unsigned kHostPortable = 1;                  // locked for all devices
inline constexpr int kCaptureRelaxed = 2;                     // cudaStreamCaptureMode
inline constexpr int kNotCaptured = 0;                        // cudaStreamCaptureStatus
inline constexpr int kRegisteredMemoryAsItIs = 91;            // cudaDevAttrCanUseHostPointerForRegisteredMem
inline constexpr int kLocationDevice = 1, kLocationHost = 2;  // cudaMemLocationType
inline constexpr int kAccessInStreamOrder = 1;                // cudaMemcpySrcAccessOrder
inline constexpr unsigned kPreferOverlapWithCompute = 1;      // cudaMemcpyFlags

struct Location {
  int type;
  int id;
};

struct CopyAttributes {
  int source_access;
  Location source, destination;
  unsigned flags;
};

struct Api {
  int (*get_device_count)(int* count);
  int (*device_attribute)(int* value, int attribute, int device);
  int (*pci_address)(char* address, int length, int device);
  int (*runtime_version)(int* version);
  int (*driver_version)(int* version);
  int (*get_last_error)();
  const char* (*error_name)(int code);
  const char* (*error_string)(int code);
  int (*stream_priorities)(int* lowest, int* highest);
  int (*stream_create)(Stream* stream, unsigned flags, int priority);
  int (*stream_destroy)(Stream stream);
  int (*stream_synchronize)(Stream stream);
  int (*stream_wait_event)(Stream stream, EventHandle event, unsigned flags);
  int (*stream_is_captured)(Stream stream, int* status);
  int (*exchange_capture_mode)(int* mode);
  int (*event_create)(EventHandle* event, unsigned flags);
  int (*event_destroy)(EventHandle event);
  int (*event_record)(EventHandle event, Stream stream);
  int (*event_synchronize)(EventHandle event);
  int (*copy)(void* to, const void* from, size_t bytes, int kind, Stream stream);
  int (*copy_2d)(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height, int kind,
                 Stream stream);
  int (*allocate)(void** memory, size_t bytes);
  int (*release)(void* memory);
  int (*host_allocate)(void** memory, size_t bytes, unsigned flags);
  int (*host_release)(void* memory);
  int (*host_register)(void* memory, size_t bytes, unsigned flags);
  int (*host_unregister)(void* memory);
  int (*clear)(void* memory, int value, size_t bytes, Stream stream);

  // One of these or neither is there: the first since CUDA 12.8, the second, without `failed`, since 13.0.
  int (*copy_batch_12)(void** to, void** from, size_t* bytes, size_t count, CopyAttributes* attributes,
                       size_t* attribute_starts, size_t attribute_count, size_t* failed, Stream stream);
  int (*copy_batch_13)(void* const* to, const void* const* from, const size_t* bytes, size_t count,
                       CopyAttributes* attributes, size_t* attribute_starts, size_t attribute_count, Stream stream);

  // These are the driver's functions. Contexts are pushed and popped, because every cudaSetDevice makes a context of
  // hundreds of MiB on its device, even if it only restores the current device. The driver launches kernels, so that
  // the image of one version of CUDA loads beside every later version.
  int (*device_get)(int* device, int ordinal);
  int (*context_retain)(Context* context, int device);
  int (*context_release)(int device);
  int (*context_push)(Context context);
  int (*context_pop)(Context* context);
  int (*module_load)(void** module, const void* image);
  int (*module_function)(void** function, void* module, const char* name);
  int (*module_unload)(void* module);
  int (*launch)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                unsigned block_z, unsigned shared_bytes, Stream stream, void** arguments, void** extra);
};

// Returns the libraries of the runtime in the order of trial: with `loaded`, those that are loaded already, which are
// the framework's and perhaps one of another library; otherwise those that the system finds.
std::vector<void*> runtimes(bool loaded);

// Fills `api` from a runtime; false, with the reason, if the runtime or the driver lacks a function.
bool load(void* runtime, Api& api, std::string& reason);

}  // namespace vescale_ckpt::device::cuda
