// A CUDA runtime and driver for Python's tests: the functions that the engine looks up (csrc/device/cuda_api.h), over
// the host's memory. Streams are threads, so that copies are late. Built and loaded by tests/fake_cuda.py.
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
#include <string>
#include <thread>
#include <utility>

namespace {

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

struct State {
  std::mutex mutex;  // guards all below
  std::map<std::string, uint64_t> counts;
  std::map<std::string, int64_t> fail_after;  // calls that still work
  std::map<uintptr_t, size_t> locked;
  int sticky = 0;
  int delay_us = 0;  // of each copy
};
State& state = *new State;  // threads use it while the process ends
thread_local int last_error = 0;

constexpr int kFailure = 719;  // cudaErrorLaunchFailure

int called(const std::string& name, uint64_t times = 1) {
  const std::lock_guard lock(state.mutex);
  state.counts[name] += times;
  const auto fault = state.fail_after.find(name);
  if (fault != state.fail_after.end() && fault->second-- <= 0) {
    state.fail_after.erase(fault);
    return last_error = 1;
  }
  return last_error = state.sticky;
}

void copy_later(void* to, const void* from, size_t bytes, int kind, void* stream) {
  static_cast<Stream*>(stream)->push([=] {
    int delay = 0;
    {
      const std::lock_guard lock(state.mutex);
      delay = state.delay_us;
      const auto fault = state.fail_after.find("on the device");
      if (fault != state.fail_after.end() && fault->second-- <= 0) state.sticky = kFailure;
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
void fake_fail(const char* name, int64_t skip) {
  const std::lock_guard lock(state.mutex);
  state.fail_after[name] = skip;
}
void fake_reset() {
  const std::lock_guard lock(state.mutex);
  state.counts.clear();
  state.fail_after.clear();
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
  return *count = 2, called(__func__);
}
int cudaDeviceGetAttribute(int* value, int, int) {
  return *value = 1, called(__func__);
}
int cudaDeviceGetPCIBusId(char* address, int, int) {
  return std::strcpy(address, "0000:00:00.0"), called(__func__);
}
int cudaRuntimeGetVersion(int* version) {
  return *version = 13000, 0;
}
int cudaDriverGetVersion(int* version) {
  return *version = 13000, 0;
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
  if (crosses(host, bytes)) return last_error = 1;
  if (!is_locked(host)) called("copies of memory that is not locked");
  copy_later(to, from, bytes, kind, stream);
  return 0;
}
int cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                      int kind, void* stream) {
  if (const int code = called(__func__); code != 0) return code;
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
  for (size_t i = 0; i < count; ++i) {
    const void* host = to_device ? from[i] : to[i];
    if (crosses(host, bytes[i])) return last_error = 1;
    if (!is_locked(host)) called("copies of memory that is not locked");
    copy_later(to[i], from[i], bytes[i], to_device ? 1 : 2, stream);
  }
  return 0;
}
int cudaMalloc(void** memory, size_t bytes) {
  return *memory = new char[bytes], called(__func__);
}
int cudaFree(void* memory) {
  return delete[] static_cast<char*>(memory), called(__func__);
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
  return *device = ordinal, 0;
}
int cuDeviceGetName(char* name, int, int) {
  return std::strcpy(name, "Fake"), 0;
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
  return *context = reinterpret_cast<void*>(intptr_t{256} + device), 0;
}
int cuDevicePrimaryCtxRelease_v2(int) {
  return 0;
}
int cuCtxPushCurrent_v2(void*) {
  return 0;
}
int cuCtxPopCurrent_v2(void** context) {
  return *context = nullptr, 0;
}
int cuModuleLoadData(void**, const void*) {
  return called(__func__), 209;
}  // no kernel image is for this device
int cuModuleGetFunction(void**, void*, const char*) {
  return 1;
}
int cuModuleUnload(void*) {
  return 0;
}
int cuLaunchKernel(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**) {
  return 1;
}

}  // extern "C"
