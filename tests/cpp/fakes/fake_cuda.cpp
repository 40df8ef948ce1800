// A CUDA runtime and driver for tests: the functions that the engine looks up (csrc/device/cuda_api.h), over the host's
// memory. Streams are threads, so that copies are late and ThreadSanitizer sees every order that is missing.
// Allocations of a device have borders, which no copy may cross, and addresses that crash who follows them, except
// those of fake_allocation. Any call can fail. Python's tests load it as a library (tests/harness/fake_cuda.py).
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "device/pack_rows.h"
#include "device/word_sums.h"
#include "fake_queue.h"

namespace {

using vescale_ckpt::device::PackDim;
using vescale_ckpt::device::PackRow;
using vescale_ckpt::device::WordPowers;
using vescale_ckpt::device::WordRow;
using vescale_ckpt::device::WordSum;
using Stream = vescale_ckpt::device::FakeQueue;

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
  uint64_t next() {
    const std::lock_guard lock(mutex);
    return ++recorded;
  }
  uint64_t last() {
    const std::lock_guard lock(mutex);
    return recorded;
  }
};
using EventHandle = std::shared_ptr<Event>;  // streams may still wait for one that is destroyed

struct Fault {
  int64_t skip;  // calls that still work
  int code;
};

struct State {
  std::mutex mutex;  // guards all below
  std::condition_variable changed;
  std::map<std::string, uint64_t> counts;
  std::map<std::string, Fault> faults;
  std::map<uintptr_t, size_t> locked;
  std::map<uintptr_t, size_t> allocations;         // of devices
  std::set<void*> objects, host_objects;           // streams, events and memory that the engine has not given back
  std::multimap<uintptr_t, size_t> under_copies;   // host memory
  uint64_t queued = 0, running = 0, failures = 0;  // copies; what fails on the device ends those that are queued
  std::map<std::string, int> answers = {
      {"driver version", 13000}, {"host addresses are the device's", 1}, {"kernels compute wrong", 0}};
  int sticky = 0;
  int delay_us = 0;  // of each copy
  Stream default_streams[2];
  std::map<void*, int> device_of;  // of streams and events
};
State& state = *new State;               // threads use it while the process ends
thread_local int last_error = 0;         // until it is asked for
thread_local std::vector<int> contexts;  // the devices of those that are pushed

constexpr int kFailure = 719;  // cudaErrorLaunchFailure
// The address of memory of a device, which no address of the host looks like.
constexpr uint64_t kTag = uint64_t{0xD} << 60;
constexpr unsigned kDeviceShift = 48;

uint64_t tagged(const void* memory, int device) {
  return kTag | static_cast<uint64_t>(device) << kDeviceShift | reinterpret_cast<uintptr_t>(memory);
}
std::byte* behind(uint64_t address) {
  return reinterpret_cast<std::byte*>(address & ((uint64_t{1} << kDeviceShift) - 1));
}
std::byte* behind(const void* address) {
  return behind(reinterpret_cast<uintptr_t>(address));
}

Stream& stream_of(void* handle) {
  if (handle != nullptr) return *static_cast<Stream*>(handle);
  return state.default_streams[contexts.empty() ? 0 : contexts.back()];
}

// Whether a call, or work on a device, fails now.
int failure_locked(const std::string& name) {
  const auto fault = state.faults.find(name);
  if (fault == state.faults.end() || fault->second.skip-- > 0) return 0;
  const int code = fault->second.code;
  state.faults.erase(fault);
  ++state.counts["faults"];
  return code;
}

int called(const std::string& name, bool needs_device = true) {
  const std::lock_guard lock(state.mutex);
  ++state.counts[name];
  if (needs_device && contexts.empty()) ++state.counts["calls without a device"];
  int code = failure_locked(name);
  if (code == 0) code = state.sticky;
  if (code != 0) last_error = code;
  return code;
}

int answer(const char* question) {
  const std::lock_guard lock(state.mutex);
  return state.answers.at(question);
}

// Nothing that was queued runs, and every call fails from now on.
void fail_devices(std::unique_lock<std::mutex>& lock, int code) {
  ++state.failures;
  state.queued = 0;
  state.changed.wait(lock, [] { return state.running == 0; });
  state.under_copies.clear();
  state.sticky = code;
}

// Queues work on a device that writes to so many bytes of the host. What returns false has failed.
void queue(void* stream, const void* host, size_t bytes, std::function<bool()> work) {
  const std::lock_guard lock(state.mutex);
  if (state.sticky != 0) return;
  ++state.queued;
  const auto place = state.under_copies.emplace(reinterpret_cast<uintptr_t>(host), bytes);
  stream_of(stream).push([=, failures = state.failures] {
    std::unique_lock lock(state.mutex);
    if (state.failures != failures) return;
    --state.queued;
    if (failure_locked("on the device") != 0) return fail_devices(lock, kFailure);
    ++state.running;
    const std::chrono::microseconds delay(state.delay_us);
    lock.unlock();
    std::this_thread::sleep_for(delay);
    const bool whole = work();
    lock.lock();
    state.under_copies.erase(place);
    if (bytes != 0) ++state.counts["copies to host"];
    --state.running;
    state.changed.notify_all();
    if (!whole) fail_devices(lock, kFailure);
  });
}

void copy_later(void* to, const void* from, size_t to_pitch, size_t from_pitch, size_t width, size_t height, int kind,
                void* stream) {
  const size_t written = kind == 2 ? (height - 1) * to_pitch + width : 0;
  queue(stream, to, written, [=] {
    for (size_t i = 0; i < height; ++i) {
      std::memcpy(behind(to) + i * to_pitch, behind(from) + i * from_pitch, width);
    }
    if (kind == 2) return true;
    const std::lock_guard lock(state.mutex);
    state.counts["bytes to device"] += width * height;
    return true;
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
  const bool elsewhere = behind(device) != reinterpret_cast<std::byte*>(device) && !contexts.empty() &&
                         static_cast<int>(device >> kDeviceShift & 0xFFF) != contexts.back();
  bool inside = !elsewhere && after != state.allocations.begin();
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

void allocate(uint64_t begin, size_t bytes) {
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

bool reads_one_allocation(const WordRow& row, uint64_t runs) {
  const int64_t reach = static_cast<int64_t>(runs - 1) * row.memory_stride;
  const int64_t low = std::min<int64_t>(reach, 0), high = std::max<int64_t>(reach, 0) + static_cast<int64_t>(row.run);
  return in_one_allocation(row.address + static_cast<uint64_t>(low), static_cast<size_t>(high - low));
}

// The kernels of csrc/device/kernels.cu.
constexpr char kPack[] = "vescale_ckpt_pack", kSumWords[] = "vescale_ckpt_sum_words";

template <typename T>
T argument(void** arguments, size_t number) {
  return *static_cast<T*>(arguments[number]);
}

template <typename T>
T* array_argument(void** arguments, size_t number) {
  return reinterpret_cast<T*>(behind(argument<uint64_t>(arguments, number)));
}

void launch_pack(void* stream, void** arguments) {
  char* const slab = array_argument<char>(arguments, 0);
  const auto* const table = array_argument<const PackRow>(arguments, 1);
  const auto row_count = argument<uint32_t>(arguments, 2), bytes = argument<uint32_t>(arguments, 4);
  const auto* const dims = array_argument<const PackDim>(arguments, 3);
  queue(stream, nullptr, 0, [=] {
    std::vector<PackRow> rows(table, table + row_count);
    uint32_t end = 0;
    for (PackRow& row : rows) {
      if (row.offset < end || row.bytes == 0 || !reads_one_allocation(row, dims)) return false;
      end = row.offset + row.bytes;
      row.address = reinterpret_cast<uintptr_t>(behind(row.address));
    }
    for (uint32_t piece = 0; piece * vescale_ckpt::device::kPackPieceBytes < bytes; ++piece) {
      for (uint32_t lane = 0; lane < vescale_ckpt::device::kPackLanes; ++lane) {
        vescale_ckpt::device::copy_piece(slab, rows.data(), row_count, dims, bytes, piece, lane);
      }
    }
    return end == bytes;
  });
}

void launch_sum_words(void* stream, void** arguments, uint64_t warps) {
  auto* const sums = array_argument<WordSum>(arguments, 0);
  const auto* const powers = array_argument<const WordPowers>(arguments, 1);
  const auto* const table = array_argument<const WordRow>(arguments, 2);
  const auto row_count = argument<uint32_t>(arguments, 3), pieces = argument<uint32_t>(arguments, 4);
  const bool wrong = answer("kernels compute wrong") != 0;
  queue(stream, nullptr, 0, [=] {
    if (warps < pieces) return false;
    std::vector<WordRow> rows(table, table + row_count);
    for (size_t i = 0; i < rows.size(); ++i) {
      const uint32_t end = i + 1 < rows.size() ? rows[i + 1].first_piece : pieces;
      if (!reads_one_allocation(rows[i], (end - rows[i].first_piece) / rows[i].run_pieces)) return false;
      rows[i].address = reinterpret_cast<uintptr_t>(behind(rows[i].address));
    }
    for (uint32_t piece = 0; piece < pieces; ++piece) {
      const uint32_t index = vescale_ckpt::device::row_of_piece(rows.data(), row_count, piece);
      for (uint32_t lane = 0; lane < vescale_ckpt::device::kSumLanes; ++lane) {
        vescale_ckpt::field::Value sum =
            vescale_ckpt::device::lane_sum(rows[index], piece - rows[index].first_piece, lane, *powers);
        for (uint64_t& column : sums[index].columns) {
          column += static_cast<uint32_t>(sum);
          sum >>= 32;
        }
      }
      sums[index].columns[0] += wrong;
    }
    return true;
  });
}

bool is_locked(const void* host) {
  const std::lock_guard lock(state.mutex);
  if (state.host_objects.contains(const_cast<void*>(host))) return true;
  const auto at = reinterpret_cast<uintptr_t>(host);
  const auto after = state.locked.upper_bound(at);
  if (after == state.locked.begin()) return false;
  const auto& [from, size] = *std::prev(after);
  return at < from + size;
}

// Locks and unlocks wait for all copies: none may be under way there.
void look_for_copies_locked(uintptr_t memory, size_t bytes) {
  for (const auto& [host, copied] : state.under_copies) {
    state.counts["locks under copies"] += host < memory + bytes && memory < host + copied;
  }
}

int keep(void* object) {
  const std::lock_guard lock(state.mutex);
  state.objects.insert(object);
  state.device_of[object] = contexts.empty() ? 0 : contexts.back();
  return 0;
}
// A stream and its events are those of the current device.
void expect_current(void* object) {
  const std::lock_guard lock(state.mutex);
  const auto found = state.device_of.find(object);
  state.counts["calls on another device"] +=
      found != state.device_of.end() && (contexts.empty() || found->second != contexts.back());
}
void forget(void* object) {
  const std::lock_guard lock(state.mutex);
  state.objects.erase(object);
  state.device_of.erase(object);
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
  if (std::string(name) == "objects") return state.objects.size();
  if (std::string(name) == "copies in flight") return state.queued + state.running;
  return state.counts[name];
}
// The call after the next `skip` ones fails, once; "on the device": the copy, and everything from then on.
void fake_fail(const char* name, int64_t skip, int code) {
  const std::lock_guard lock(state.mutex);
  state.faults[name] = {skip, code};
}
// As if work of the trainer had failed on the device: every call fails from now on.
void fake_stick(int code) {
  std::unique_lock lock(state.mutex);
  fail_devices(lock, last_error = code);
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
  allocate(reinterpret_cast<uintptr_t>(memory), bytes);
}
// Nothing fails any more.
void fake_heal() {
  const std::lock_guard lock(state.mutex);
  state.faults.clear();
  state.sticky = 0;
}
void fake_reset() {
  fake_heal();
  const std::lock_guard lock(state.mutex);
  state.counts.clear();
  state.delay_us = 0;
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
  stream_of(stream).push([=] {
    std::this_thread::sleep_for(std::chrono::milliseconds(delay_ms));
    std::memset(memory, value, bytes);
  });
}
void fake_drain(void* stream) {
  stream_of(stream).drain();
}

// --- CUDA's runtime

int cudaGetDeviceCount(int* count) {
  return *count = 2, called(__func__, false);
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
  if (const int code = called(__func__); code != 0) return code;
  return keep(*stream = new Stream);
}
int cudaStreamDestroy(void* stream) {
  forget(stream);
  delete static_cast<Stream*>(stream);
  return called(__func__);
}
int cudaStreamSynchronize(void* stream) {
  stream_of(stream).drain();
  return called(__func__);
}
int cudaStreamWaitEvent(void* stream, void* event, unsigned) {
  const auto of = *static_cast<EventHandle*>(event);
  stream_of(stream).push([of, number = of->last()] { of->wait(number); });
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
  if (const int code = called(__func__); code != 0) return code;
  return keep(*event = new EventHandle(std::make_shared<Event>()));
}
int cudaEventDestroy(void* event) {
  forget(event);
  delete static_cast<EventHandle*>(event);
  return called(__func__);
}
int cudaEventRecord(void* event, void* stream) {
  expect_current(stream);
  expect_current(event);
  const auto of = *static_cast<EventHandle*>(event);
  stream_of(stream).push([of, number = of->next()] { of->pass(number); });
  return called(__func__);
}
int cudaEventSynchronize(void* event) {
  Event& of = **static_cast<EventHandle*>(event);
  of.wait(of.last());
  return called(__func__);
}
int cudaMemcpyAsync(void* to, const void* from, size_t bytes, int kind, void* stream) {
  expect_current(stream);
  if (const int code = called(__func__); code != 0) return code;
  const void* host = kind == 1 ? from : to;
  if (crosses(host, bytes) || !in_one_allocation(kind == 1 ? to : from, bytes)) return last_error = 1;
  if (!is_locked(host)) called("copies of memory that is not locked");
  copy_later(to, from, bytes, bytes, bytes, 1, kind, stream);
  return 0;
}
int cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                      int kind, void* stream) {
  if (const int code = called(__func__); code != 0) return code;
  const auto reach = [&](size_t pitch) { return (height - 1) * pitch + width; };
  if (width > to_pitch || width > from_pitch ||
      crosses(kind == 1 ? from : to, reach(kind == 1 ? from_pitch : to_pitch)) ||
      !in_one_allocation(kind == 1 ? to : from, reach(kind == 1 ? to_pitch : from_pitch))) {
    return last_error = 1;
  }
  if (!is_locked(kind == 1 ? from : to)) called("copies of memory that is not locked");
  copy_later(to, from, to_pitch, from_pitch, width, height, kind, stream);
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
    copy_later(to[i], from[i], bytes[i], bytes[i], bytes[i], 1, to_device ? 1 : 2, stream);
  }
  return 0;
}
int cudaMemsetAsync(void* memory, int value, size_t bytes, void* stream) {
  if (const int code = called(__func__); code != 0) return code;
  stream_of(stream).push([=] { std::memset(behind(memory), value, bytes); });
  return 0;
}
int cudaMalloc(void** memory, size_t bytes) {
  if (const int code = called(__func__); code != 0) return code;
  void* const own = ::operator new(bytes, std::align_val_t{256});
  std::memset(own, 0xEE, bytes);
  const uint64_t address = tagged(own, contexts.empty() ? 0 : contexts.back());  // as CUDA, which has device 0 current
  allocate(address, bytes);
  *memory = reinterpret_cast<void*>(address);
  return keep(own);
}
int cudaFree(void* memory) {
  {
    const std::lock_guard lock(state.mutex);
    state.allocations.erase(reinterpret_cast<uintptr_t>(memory));
  }
  forget(behind(memory));
  ::operator delete(behind(memory), std::align_val_t{256});
  return called(__func__);
}
int cudaHostAlloc(void** memory, size_t bytes, unsigned) {
  if (const int code = called(__func__); code != 0) return code;
  const std::lock_guard lock(state.mutex);
  state.host_objects.insert(*memory = new char[bytes]);
  return 0;
}
int cudaFreeHost(void* memory) {
  {
    const std::lock_guard lock(state.mutex);
    state.host_objects.erase(memory);
  }
  delete[] static_cast<char*>(memory);
  return called(__func__);
}
int cudaHostRegister(void* memory, size_t bytes, unsigned) {
  if (const int code = called(__func__); code != 0) return code;
  if (crosses(memory, bytes) || is_locked(memory)) return last_error = 1;
  const std::lock_guard lock(state.mutex);
  look_for_copies_locked(reinterpret_cast<uintptr_t>(memory), bytes);
  state.locked[reinterpret_cast<uintptr_t>(memory)] = bytes;
  return 0;
}
int cudaHostUnregister(void* memory) {
  const std::lock_guard lock(state.mutex);
  const auto found = state.locked.find(reinterpret_cast<uintptr_t>(memory));
  if (found == state.locked.end()) return 1;
  look_for_copies_locked(found->first, found->second);
  state.locked.erase(found);
  return 0;
}

// --- CUDA's driver

int cuDeviceGet(int* device, int ordinal) {
  return *device = ordinal, called(__func__, false);
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
  return *context = reinterpret_cast<void*>(intptr_t{256} + device), called(__func__, false);
}
int cuDevicePrimaryCtxRelease_v2(int) {
  return 0;
}
int cuCtxPushCurrent_v2(void* context) {
  const std::lock_guard lock(state.mutex);
  const int code = failure_locked(__func__);
  if (code == 0) contexts.push_back(static_cast<int>(reinterpret_cast<intptr_t>(context) - 256));
  return code;
}
int cuCtxPopCurrent_v2(void** context) {
  return contexts.pop_back(), *context = nullptr, 0;
}
int cuModuleLoadData(void** module, const void*) {
  return *module = module, called(__func__);
}
int cuModuleGetFunction(void** function, void*, const char* name) {
  *function = const_cast<char*>(std::string(name) == kPack ? kPack : kSumWords);
  return called(__func__);
}
int cuModuleUnload(void*) {
  return 0;
}
int cuLaunchKernel(void* function, unsigned grid, unsigned, unsigned, unsigned block, unsigned, unsigned, unsigned,
                   void* stream, void** arguments, void**) {
  if (const int code = called(__func__); code != 0) return code;
  const uint64_t warps = uint64_t{grid} * block / vescale_ckpt::device::kSumLanes;
  function == kPack ? launch_pack(stream, arguments) : launch_sum_words(stream, arguments, warps);
  return 0;
}

}  // extern "C"
