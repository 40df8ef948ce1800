// CUDA's functions for tests: they work at once, on host memory, and answer what a test wants.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "device/cuda.h"
#include "device/notes.h"
#include "device/pack_rows.h"
#include "device/pipeline.h"

namespace vescale_ckpt::device {
namespace {

using namespace std::chrono_literals;
using cuda::Api;

// What the functions below saw and are told to answer. One test, one thread at a time.
struct Seen {
  std::map<std::string, int> calls, answers;  // by name; an answer holds for every call
  int last_error = 0;
  int version = 13000;
  int driver = 13010;
  int as_it_is = 1;  // what the host addresses of locked memory are to the device
  std::map<cuda::Stream, int> captured;
  std::vector<cuda::Context> contexts;  // pushed
  std::vector<std::string> without_device;
  size_t batched = 0, most_in_batch = 0;
  std::vector<int> priorities;                                      // of streams, as they were made
  std::vector<std::byte> device = std::vector<std::byte>(1 << 20);  // "device memory" of the tests
};
Seen seen;

constexpr intptr_t kContext = 0x100;

int called(const char* name, bool needs_device = true) {
  ++seen.calls[name];
  if (needs_device && seen.contexts.empty()) seen.without_device.push_back(name);
  const auto answer = seen.answers.find(name);
  if (answer != seen.answers.end()) seen.last_error = answer->second;
  return answer != seen.answers.end() ? answer->second : 0;
}

int copy_now(void* to, const void* from, size_t bytes) {
  std::memcpy(to, from, bytes);
  return 0;
}

int batch_now(void* const* to, const void* const* from, const size_t* bytes, size_t count,
              const cuda::CopyAttributes* attributes, const size_t* starts, size_t attribute_count) {
  if (attribute_count != 1 || starts[0] != 0 || attributes->source_access != cuda::kAccessInStreamOrder) return 1;
  for (size_t i = 0; i < count; ++i) copy_now(to[i], from[i], bytes[i]);
  seen.batched += count;
  seen.most_in_batch = std::max(seen.most_in_batch, count);
  return 0;
}

// The launch of a kernel as gather.cu declares it.
int launch_now(void* function, unsigned grid, unsigned block, void** arguments) {
  char* slab = *static_cast<char**>(arguments[0]);
  const auto* rows = *static_cast<const PackRow**>(arguments[1]);
  const uint32_t row_count = *static_cast<uint32_t*>(arguments[2]);
  const auto* dims = *static_cast<const PackDim**>(arguments[3]);
  const uint32_t bytes = *static_cast<uint32_t*>(arguments[4]);
  EXPECT_STREQ(static_cast<const char*>(function), "vescale_ckpt_pack");
  for (uint32_t thread = 0; thread < grid * block; ++thread) {
    const uint32_t piece = thread / kPackLanes, lane = thread % kPackLanes;
    if (piece * kPackPieceBytes >= bytes) break;
    copy_piece(slab, rows, row_count, dims, bytes, piece, lane);
  }
  return 0;
}

Api fake_api() {
  Api api{};
  api.get_device_count = [](int* count) { return *count = 2, called("count", false); };
  api.device_attribute = [](int* value, int attribute, int) {
    EXPECT_EQ(attribute, cuda::kRegisteredMemoryAsItIs);
    return *value = seen.as_it_is, called("device_attribute", false);
  };
  api.pci_address = [](char* address, int length, int device) {
    std::snprintf(address, static_cast<size_t>(length), "0000:%dB:00.0", device);
    return called("pci_address", false);
  };
  api.stream_is_captured = [](cuda::Stream stream, int* status) {
    return *status = seen.captured[stream], called("stream_is_captured");
  };
  api.runtime_version = [](int* version) { return *version = seen.version, 0; };
  api.driver_version = [](int* version) { return *version = seen.driver, 0; };
  api.get_last_error = [] { return std::exchange(seen.last_error, 0); };
  api.error_name = [](int) { return "cudaErrorFake"; };
  api.error_string = [](int) { return "not today"; };
  api.stream_priorities = [](int* lowest, int* highest) {
    *lowest = 0;
    *highest = -5;
    return called("stream_priorities");
  };
  api.stream_create = [](cuda::Stream* stream, unsigned flags, int priority) {
    if (const int answer = called("stream_create"); answer != 0) return --seen.calls["stream_create"], answer;
    *stream = new int(static_cast<int>(flags));
    seen.priorities.push_back(priority);
    return 0;
  };
  api.stream_destroy = [](cuda::Stream stream) { return delete static_cast<int*>(stream), called("stream_destroy"); };
  api.stream_synchronize = [](cuda::Stream) { return called("stream_synchronize"); };
  api.stream_wait_event = [](cuda::Stream, cuda::EventHandle, unsigned) { return called("stream_wait_event"); };
  api.exchange_capture_mode = [](int* mode) { return *mode = 0, called("exchange_capture_mode"); };
  api.event_create = [](cuda::EventHandle* event, unsigned flags) {
    if (const int answer = called("event_create"); answer != 0) return --seen.calls["event_create"], answer;
    *event = new int(static_cast<int>(flags));
    return 0;
  };
  api.event_destroy = [](cuda::EventHandle event) { return delete static_cast<int*>(event), called("event_destroy"); };
  api.event_record = [](cuda::EventHandle, cuda::Stream) { return called("event_record"); };
  api.event_synchronize = [](cuda::EventHandle) { return called("event_synchronize"); };
  api.copy = [](void* to, const void* from, size_t bytes, int, cuda::Stream) {
    const int answer = called("copy");
    return answer != 0 ? answer : copy_now(to, from, bytes);
  };
  api.copy_2d = [](void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height, int,
                   cuda::Stream) {
    for (size_t i = 0; i < height; ++i) {
      copy_now(static_cast<char*>(to) + i * to_pitch, static_cast<const char*>(from) + i * from_pitch, width);
    }
    return called("copy_2d");
  };
  api.allocate = [](void** memory, size_t bytes) {
    const int answer = called("allocate");
    if (answer == 0) *memory = std::memset(::aligned_alloc(256, (bytes + 255) / 256 * 256), 0xAB, bytes);
    return answer;
  };
  api.clear = [](void* memory, int value, size_t bytes, cuda::Stream) {
    return std::memset(memory, value, bytes), called("clear");
  };
  api.current_device = [](int* device) { return *device = 1, called("current_device", false); };
  api.release = [](void* memory) { return std::free(memory), called("release"); };
  api.host_allocate = [](void** memory, size_t bytes, unsigned) {
    const int answer = called("host_allocate");
    if (answer == 0) *memory = std::malloc(bytes);
    return answer;
  };
  api.host_release = [](void* memory) { return std::free(memory), called("host_release"); };
  api.host_register = [](void*, size_t, unsigned) { return called("host_register"); };
  api.host_unregister = [](void*) { return called("host_unregister"); };
  api.device_get = [](int* device, int ordinal) { return *device = ordinal, called("device_get", false); };
  api.device_name = [](char* name, int, int) { return std::strcpy(name, "Fake 9000"), called("device_name", false); };
  api.context_retain = [](cuda::Context* context, int device) {
    *context = reinterpret_cast<cuda::Context>(kContext + device);
    return called("context_retain", false);
  };
  api.context_release = [](int) { return called("context_release", false); };
  api.context_push = [](cuda::Context context) {
    const int answer = called("context_push", false);
    if (answer == 0) seen.contexts.push_back(context);
    return answer;
  };
  api.context_pop = [](cuda::Context* context) {
    *context = seen.contexts.back();
    seen.contexts.pop_back();
    return 0;
  };
  api.module_load = [](void** module, const void* image) {
    *module = const_cast<void*>(image);
    return called("module_load");
  };
  api.module_function = [](void** function, void*, const char* name) {
    *function = const_cast<char*>(name);
    return called("module_function");
  };
  api.module_unload = [](void*) { return called("module_unload"); };
  api.launch = [](void* function, unsigned grid, unsigned, unsigned, unsigned block, unsigned, unsigned, unsigned,
                  cuda::Stream, void** arguments, void**) {
    const int answer = called("launch");
    return answer != 0 ? answer : launch_now(function, grid, block, arguments);
  };
  return api;
}

Api with_batch_12() {
  Api api = fake_api();
  api.copy_batch_12 = [](void** to, void** from, size_t* bytes, size_t count, cuda::CopyAttributes* attributes,
                         size_t* starts, size_t attribute_count, size_t*, cuda::Stream) {
    const int answer = called("batch");
    return answer != 0 ? answer : batch_now(to, from, bytes, count, attributes, starts, attribute_count);
  };
  return api;
}

Api with_batch_13() {
  Api api = fake_api();
  api.copy_batch_13 = [](void* const* to, const void* const* from, const size_t* bytes, size_t count,
                         cuda::CopyAttributes* attributes, size_t* starts, size_t attribute_count, cuda::Stream) {
    const int answer = called("batch");
    return answer != 0 ? answer : batch_now(to, from, bytes, count, attributes, starts, attribute_count);
  };
  return api;
}

constexpr unsigned char kImage[] = {1};

bool noted(const std::string& beginning) {
  const std::vector<std::string> texts = notes();
  return std::ranges::any_of(texts, [&](const std::string& text) { return text.find(beginning) != std::string::npos; });
}

class Cuda : public ::testing::Test {
 protected:
  void SetUp() override {
    seen = {};
    for (size_t i = 0; i < seen.device.size(); ++i) seen.device[i] = static_cast<std::byte>(i * 7 + i / 255);
  }
  void TearDown() override {
    EXPECT_TRUE(seen.contexts.empty());
    EXPECT_TRUE(seen.without_device.empty()) << seen.without_device.front();
    EXPECT_EQ(seen.last_error, 0) << "the framework would find our error";
    for (const char* kind : {"stream", "event"}) {
      EXPECT_EQ(seen.calls[std::string(kind) + "_create"], seen.calls[std::string(kind) + "_destroy"]);
    }
    EXPECT_EQ(seen.calls["context_retain"], seen.calls["context_release"]);
  }

  // Small rows, a transposed one, one of long runs, a large one.
  std::vector<DeviceRow> rows(std::vector<std::byte>& host) {
    host.assign(seen.device.size(), std::byte{0});
    std::vector<DeviceRow> result;
    std::byte* at = host.data();
    const auto add = [&](uint64_t offset, uint32_t item_bytes, std::vector<int64_t> sizes,
                         std::vector<int64_t> strides) {
      result.emplace_back(reinterpret_cast<DeviceAddress>(seen.device.data()) + offset, at, item_bytes, sizes, strides);
      at += result.back().bytes;
    };
    for (uint64_t i = 0; i < 50; ++i) add(1000 + 100 * i, 1, {70}, {1});
    add(10'000, 4, {30, 40}, {1, 30});
    add(20'000, 4, {20, 2000}, {3000, 1});
    add(300'000, 1, {200'000}, {1});
    return result;
  }

  void expect_copied(CudaRuntime& runtime) {
    std::vector<std::byte> host;
    const StreamHandle producer = 0;
    Pipeline pipeline(runtime.accelerator(1));
    const std::vector<DeviceRow> copied = rows(host);
    pipeline.start(copied, {&producer, 1});
    ASSERT_TRUE(pipeline.wait(10min));
    for (uint64_t i = 0; i < 30; ++i) {
      for (uint64_t j = 0; j < 40; ++j) {
        ASSERT_EQ(std::memcmp(&host[3500 + 4 * (40 * i + j)], &seen.device[10'000 + 4 * (i + 30 * j)], 4), 0);
      }
    }
    for (const DeviceRow& row : copied) {
      for (uint64_t at = 0; at < row.bytes; at += row.run) {
        const uint64_t place = row.address_of_run(at) - reinterpret_cast<DeviceAddress>(seen.device.data());
        ASSERT_EQ(std::memcmp(row.host + at, &seen.device[place], row.run), 0);
      }
    }
  }
};

}  // namespace
}  // namespace vescale_ckpt::device
