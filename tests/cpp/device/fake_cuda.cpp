// A CUDA runtime and driver for Python's tests: the functions that the engine looks up (csrc/device/cuda_api.h), over
// the host's memory. Streams are threads, so that copies are late. Allocations of a device have borders, which no copy
// may cross. Built and loaded by tests/fake_cuda.py.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <iterator>
#include <map>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <utility>

#include "device/pack_rows.h"

namespace {

using vescale_ckpt::device::PackDim;
using vescale_ckpt::device::PackRow;

class Stream {
 public:
  void push(std::function<void()> work) {
    const std::lock_guard lock(mutex_);
    work_.push_back(std::move(work));
    changed_.notify_all();
    if (!started_) std::thread([this] { run(); }).detach();  // streams live as long as the process
    started_ = true;
  }
  void drain() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return work_.empty() && !running_; });
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return !work_.empty(); });
      const auto work = std::move(work_.front());
      work_.pop_front();
      running_ = true;
      lock.unlock();
      work();
      lock.lock();
      running_ = false;
      changed_.notify_all();
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
  bool running_ = false, started_ = false;
};

struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t recorded = 0, passed = 0;

  void pass(uint64_t number) {
    const std::lock_guard lock(mutex);
    passed = std::max(passed, number);
    changed.notify_all();
  }
  void wait(uint64_t number) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return passed >= number; });
  }
};

struct Fault {
  int64_t skip;  // calls that still work
  int code;
};

struct State {
  std::mutex mutex;  // guards all below
  std::map<std::string, uint64_t> counts;
  std::map<std::string, Fault> faults;
  std::map<uintptr_t, size_t> locked;
  std::map<uintptr_t, size_t> allocations;  // of devices
  std::map<std::string, int> answers = {{"driver version", 13000}, {"host addresses are the device's", 1}};
  int sticky = 0;
  int delay_us = 0;  // of each copy
};
State& state = *new State;        // threads use it while the process ends
thread_local int last_error = 0;  // until it is asked for
thread_local int contexts = 0;    // pushed

constexpr int kFailure = 719;  // cudaErrorLaunchFailure

int called(const std::string& name, bool needs_device = true) {
  const std::lock_guard lock(state.mutex);
  ++state.counts[name];
  if (needs_device && contexts == 0) ++state.counts["calls without a device"];
  int code = state.sticky;
  const auto fault = state.faults.find(name);
  if (fault != state.faults.end() && fault->second.skip-- <= 0) {
    code = fault->second.code;
    state.faults.erase(fault);
  }
  if (code != 0) last_error = code;
  return code;
}

int answer(const char* question) {
  const std::lock_guard lock(state.mutex);
  return state.answers.at(question);
}

void copy_later(void* to, const void* from, size_t bytes, int kind, void* stream) {
  static_cast<Stream*>(stream)->push([=] {
    int delay = 0;
    {
      const std::lock_guard lock(state.mutex);
      delay = state.delay_us;
      const auto fault = state.faults.find("on the device");
      if (fault != state.faults.end() && fault->second.skip-- <= 0) state.sticky = kFailure;
      if (state.sticky != 0) return;
      state.counts[kind == 1 ? "bytes to device" : "bytes to host"] += bytes;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(delay));
    std::memcpy(to, from, bytes);
  });
}

// A copy must lie in one range of locked memory, or in none.
bool crosses(const void* host, size_t bytes) {
  const std::lock_guard lock(state.mutex);
  const auto begin = reinterpret_cast<uintptr_t>(host), end = begin + bytes;
  for (const auto& [from, size] : state.locked) {
    const uintptr_t to = from + size;
    if (begin < to && end > from && (begin < from || end > to)) return true;
  }
  return false;
}

// As the driver has it: a copy lies in one allocation of a device.
bool in_one_allocation(uint64_t device, size_t bytes) {
  const std::lock_guard lock(state.mutex);
  const auto after = state.allocations.upper_bound(device);
  bool inside = after != state.allocations.begin();
  if (inside) {
    const auto& [from, size] = *std::prev(after);
    inside = device + bytes <= from + size;
  }
  if (!inside) ++state.counts["copies across allocations"];
  return inside;
}

bool in_one_allocation(const void* device, size_t bytes) {
  return in_one_allocation(reinterpret_cast<uintptr_t>(device), bytes);
}

void allocate(const void* memory, size_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(memory);
  const std::lock_guard lock(state.mutex);
  auto at = state.allocations.lower_bound(begin);
  if (at != state.allocations.begin() && std::prev(at)->first + std::prev(at)->second > begin) --at;
  while (at != state.allocations.end() && at->first < begin + bytes) at = state.allocations.erase(at);  // freed since
  state.allocations[begin] = bytes;
}

// All that a row of the kernel's table reaches.
bool reads_one_allocation(const PackRow& row, const PackDim* dims) {
  if (row.dims == 0) return in_one_allocation(row.address, row.bytes);
  int64_t low = 0, high = row.unit;
  for (uint32_t dim = row.dims_at; dim < row.dims_at + row.dims; ++dim) {
    const int64_t reach = static_cast<int64_t>(dims[dim].count - 1) * dims[dim].stride;
    (reach < 0 ? low : high) += reach;
  }
  return in_one_allocation(row.address + static_cast<uint64_t>(low), static_cast<size_t>(high - low));
}

bool is_locked(const void* host) {
  const std::lock_guard lock(state.mutex);
  const auto at = reinterpret_cast<uintptr_t>(host);
  const auto after = state.locked.upper_bound(at);
  if (after == state.locked.begin()) return false;
  const auto& [from, size] = *std::prev(after);
  return at < from + size;
}

struct Attributes {
  int access;
  int source_kind, source, destination_kind, destination;
  unsigned flags;
};

}  // namespace

extern "C" {

// --- For the tests

uint64_t fake_count(const char* name) {
  const std::lock_guard lock(state.mutex);
  if (std::string(name) == "locked bytes") {
    uint64_t bytes = 0;
    for (const auto& [from, size] : state.locked) bytes += size;
    return bytes;
  }
  return state.counts[name];
}
// The call after the next `skip` ones fails, once; "on the device": the copy, and everything from then on.
void fake_fail(const char* name, int64_t skip, int code) {
  const std::lock_guard lock(state.mutex);
  state.faults[name] = {skip, code};
}
// As if work of the trainer had failed on the device: every call fails from now on.
void fake_stick(int code) {
  const std::lock_guard lock(state.mutex);
  last_error = state.sticky = code;
}
// The error that the framework's next check on this thread would find, but for those of a device that has failed.
int fake_last_error() {
  const std::lock_guard lock(state.mutex);
  return state.sticky != 0 ? 0 : last_error;
}
void fake_answer(const char* question, int answer) {
  const std::lock_guard lock(state.mutex);
  state.answers.at(question) = answer;
}
// Memory of a device. What was allocated there before was freed.
void fake_allocation(void* memory, size_t bytes) {
  allocate(memory, bytes);
}
void fake_reset() {
  const std::lock_guard lock(state.mutex);
  state.counts.clear();
  state.faults.clear();
  state.sticky = state.delay_us = 0;
}
void fake_delay(int microseconds) {
  const std::lock_guard lock(state.mutex);
  state.delay_us = microseconds;
}
void* fake_stream() {
  return new Stream;
}
// Queues, on a stream of a trainer, that memory is filled, after a while.
void fake_fill(void* stream, void* memory, int value, size_t bytes, int delay_ms) {
  static_cast<Stream*>(stream)->push([=] {
    std::this_thread::sleep_for(std::chrono::milliseconds(delay_ms));
    std::memset(memory, value, bytes);
  });
}
void fake_drain(void* stream) {
  static_cast<Stream*>(stream)->drain();
}

// --- CUDA's runtime

int cudaGetDeviceCount(int* count) {
  return *count = 2, called(__func__, false);
}
int cudaGetDevice(int* device) {
  return *device = 0, called(__func__, false);
}
int cudaDeviceGetAttribute(int* value, int, int) {
  return *value = answer("host addresses are the device's"), called(__func__, false);
}
int cudaDeviceGetPCIBusId(char* address, int, int) {
  return std::strcpy(address, "0000:00:00.0"), called(__func__, false);
}
int cudaRuntimeGetVersion(int* version) {
  return *version = 13000, 0;
}
int cudaDriverGetVersion(int* version) {
  return *version = answer("driver version"), 0;
}
int cudaGetLastError() {
  return std::exchange(last_error, 0);
}
const char* cudaGetErrorName(int code) {
  return code == kFailure ? "cudaErrorFakeDevice" : "cudaErrorFakeCall";
}
const char* cudaGetErrorString(int code) {
  return code == kFailure ? "the fake device failed" : "a fake refusal";
}
int cudaDeviceGetStreamPriorityRange(int* lowest, int* highest) {
  return *lowest = 0, *highest = -5, 0;
}
int cudaStreamCreateWithPriority(void** stream, unsigned, int) {
  *stream = new Stream;
  return called(__func__);
}
int cudaStreamDestroy(void*) {
  return called(__func__);
}
int cudaStreamSynchronize(void* stream) {
  static_cast<Stream*>(stream)->drain();
  return called(__func__);
}
int cudaStreamWaitEvent(void* stream, void* event, unsigned) {
  auto* of = static_cast<Event*>(event);
  uint64_t number = 0;
  {
    const std::lock_guard lock(of->mutex);
    number = of->recorded;
  }
  static_cast<Stream*>(stream)->push([=] { of->wait(number); });
  return called(__func__);
}
int cudaStreamIsCapturing(void*, int* status) {
  const int code = called("captured");
  *status = code == 1 ? 1 : 0;
  return last_error = code == 1 ? 0 : code;
}
int cudaThreadExchangeStreamCaptureMode(int* mode) {
  return *mode = 0;
}
int cudaEventCreateWithFlags(void** event, unsigned) {
  *event = new Event;  // never deleted: streams may still wait for it
  return called(__func__);
}
int cudaEventDestroy(void*) {
  return called(__func__);
}
int cudaEventRecord(void* event, void* stream) {
  auto* of = static_cast<Event*>(event);
  uint64_t number = 0;
  {
    const std::lock_guard lock(of->mutex);
    number = ++of->recorded;
  }
  static_cast<Stream*>(stream)->push([=] { of->pass(number); });
  return called(__func__);
}
int cudaEventSynchronize(void* event) {
  auto* of = static_cast<Event*>(event);
  uint64_t number = 0;
  {
    const std::lock_guard lock(of->mutex);
    number = of->recorded;
  }
  of->wait(number);
  return called(__func__);
}
int cudaMemcpyAsync(void* to, const void* from, size_t bytes, int kind, void* stream) {
  if (const int code = called(__func__); code != 0) return code;
  const void* host = kind == 1 ? from : to;
  if (crosses(host, bytes) || !in_one_allocation(kind == 1 ? to : from, bytes)) return last_error = 1;
  if (!is_locked(host)) called("copies of memory that is not locked");
  copy_later(to, from, bytes, kind, stream);
  return 0;
}
int cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                      int kind, void* stream) {
  if (const int code = called(__func__); code != 0) return code;
  const size_t reach = (height - 1) * (kind == 1 ? to_pitch : from_pitch) + width;
  if (!in_one_allocation(kind == 1 ? to : from, reach)) return last_error = 1;
  for (size_t i = 0; i < height; ++i) {
    copy_later(static_cast<char*>(to) + i * to_pitch, static_cast<const char*>(from) + i * from_pitch, width, kind,
               stream);
  }
  return 0;
}
int cudaMemcpyBatchAsync(void* const* to, const void* const* from, const size_t* bytes, size_t count,
                         Attributes* attributes, size_t* starts, size_t attribute_count, void* stream) {
  if (const int code = called(__func__); code != 0) return code;
  if (attribute_count != 1 || starts[0] != 0) return last_error = 1;
  const bool to_device = attributes->destination_kind == 1;
  if (to_device == (attributes->source_kind == 1)) return last_error = 1;
  {
    const std::lock_guard lock(state.mutex);
    uint64_t& most = state.counts["most copies in a batch"];
    most = std::max<uint64_t>(most, count);
  }
  for (size_t i = 0; i < count; ++i) {
    const void* host = to_device ? from[i] : to[i];
    if (crosses(host, bytes[i]) || !in_one_allocation(to_device ? to[i] : from[i], bytes[i])) return last_error = 1;
    if (!is_locked(host)) called("copies of memory that is not locked");
    copy_later(to[i], from[i], bytes[i], to_device ? 1 : 2, stream);
  }
  return 0;
}
int cudaMemsetAsync(void* memory, int value, size_t bytes, void* stream) {
  if (const int code = called(__func__); code != 0) return code;
  static_cast<Stream*>(stream)->push([=] { std::memset(memory, value, bytes); });
  return 0;
}
int cudaMalloc(void** memory, size_t bytes) {
  if (const int code = called(__func__); code != 0) return code;
  allocate(*memory = ::operator new(bytes, std::align_val_t{256}), bytes);
  return 0;
}
int cudaFree(void* memory) {
  ::operator delete(memory, std::align_val_t{256});
  return called(__func__);
}
int cudaHostAlloc(void** memory, size_t bytes, unsigned) {
  return *memory = new char[bytes], called(__func__);
}
int cudaFreeHost(void* memory) {
  return delete[] static_cast<char*>(memory), called(__func__);
}
int cudaHostRegister(void* memory, size_t bytes, unsigned) {
  if (const int code = called(__func__); code != 0) return code;
  if (crosses(memory, bytes) || is_locked(memory)) return last_error = 1;
  const std::lock_guard lock(state.mutex);
  state.locked[reinterpret_cast<uintptr_t>(memory)] = bytes;
  return 0;
}
int cudaHostUnregister(void* memory) {
  const std::lock_guard lock(state.mutex);
  return state.locked.erase(reinterpret_cast<uintptr_t>(memory)) == 1 ? 0 : 1;
}

// --- CUDA's driver

int cuDeviceGet(int* device, int ordinal) {
  return *device = ordinal, called(__func__, false);
}
int cuDeviceGetName(char* name, int, int) {
  return std::strcpy(name, "Fake"), 0;
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
  return *context = reinterpret_cast<void*>(intptr_t{256} + device), called(__func__, false);
}
int cuDevicePrimaryCtxRelease_v2(int) {
  return 0;
}
int cuCtxPushCurrent_v2(void*) {
  const int code = called(__func__, false);
  contexts += code == 0;
  return code;
}
int cuCtxPopCurrent_v2(void** context) {
  return --contexts, *context = nullptr, 0;
}
int cuModuleLoadData(void** module, const void*) {
  return *module = module, called(__func__);
}
int cuModuleGetFunction(void** function, void*, const char*) {
  return *function = function, called(__func__);
}
int cuModuleUnload(void*) {
  return 0;
}
// Of the one kernel that there is (csrc/device/gather.cu).
int cuLaunchKernel(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void* stream,
                   void** arguments, void**) {
  if (const int code = called(__func__); code != 0) return code;
  char* slab = *static_cast<char**>(arguments[0]);
  const auto* rows = *static_cast<const PackRow**>(arguments[1]);
  const uint32_t row_count = *static_cast<uint32_t*>(arguments[2]);
  const auto* dims = *static_cast<const PackDim**>(arguments[3]);
  const uint32_t bytes = *static_cast<uint32_t*>(arguments[4]);
  static_cast<Stream*>(stream)->push([=] {
    for (uint32_t row = 0; row < row_count; ++row) {
      if (!reads_one_allocation(rows[row], dims)) return fake_stick(kFailure);
    }
    for (uint32_t piece = 0; piece * vescale_ckpt::device::kPackPieceBytes < bytes; ++piece) {
      for (uint32_t lane = 0; lane < vescale_ckpt::device::kPackLanes; ++lane) {
        vescale_ckpt::device::copy_piece(slab, rows, row_count, dims, bytes, piece, lane);
      }
    }
  });
  return 0;
}

}  // extern "C"
