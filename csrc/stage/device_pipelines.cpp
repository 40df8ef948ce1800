#include "stage/device_pipelines.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>

#include "base/error.h"
#include "device/cuda.h"

namespace vescale_ckpt::stage {
namespace {

// A lock of pages keeps all calls of the device out, and the next one would begin before a call that waits gets its
// turn: on an H200 a launch waited 119 ms, for 64 locks. With this pause behind each lock it waits 5 ms at most.
constexpr std::chrono::microseconds kPauseBetweenLocks{200};

// Returns an empty text if the runtime does not know the address; a save need not fail for that.
std::string pci_address_or_none(const device::Accelerator& accelerator) {
  try {
    return accelerator.pci_address();
  } catch (const Error&) {
    return {};
  }
}

// Returns the first line of a short file; an empty text if there is no such file. A stream of the standard library
// would use its locale, and crashed in a process of two C++ libraries: torch's, and one linked statically into the
// engine.
std::string first_line(const std::string& path) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "re"), &std::fclose);
  std::array<char, 256> text{};
  if (!file || std::fgets(text.data(), text.size(), file.get()) == nullptr) return {};
  std::string line = text.data();
  while (!line.empty() && std::isspace(static_cast<unsigned char>(line.back())) != 0) line.pop_back();
  return line;
}

}  // namespace

std::optional<int> nearest_node(std::span<const std::string> pci_addresses, const std::string& sysfs) {
  const std::string with_memory = first_line(sysfs + "/devices/system/node/has_memory");  // "0-1", or "0" if it is one
  if (with_memory.find_first_of(",-") == std::string::npos) return std::nullopt;
  std::set<int> nodes;  // -1: unknown
  for (std::string name : pci_addresses) {
    std::ranges::transform(name, name.begin(), [](unsigned char letter) { return std::tolower(letter); });
    const std::string text = first_line(sysfs + "/bus/pci/devices/" + name + "/numa_node");
    int node = -1;
    std::from_chars(text.data(), text.data() + text.size(), node);
    nodes.insert(node);
  }
  if (nodes.size() != 1 || *nodes.begin() < 0) return std::nullopt;
  return *nodes.begin();
}

DevicePipelines::DevicePipelines(device::DeviceRuntime& runtime, const device::CopyLimits& limits)
    : runtime_(runtime), limits_(limits) {}

DevicePipelines::Lease DevicePipelines::borrow(std::span<const int> devices) {
  std::unique_lock lock(mutex_);
  given_back_.wait(lock, [&] { return free_locked(devices); });
  return take_locked(devices);
}

std::optional<DevicePipelines::Lease> DevicePipelines::try_borrow(std::span<const int> devices) {
  const std::lock_guard lock(mutex_);
  if (!free_locked(devices)) return std::nullopt;
  return take_locked(devices);
}

void DevicePipelines::prepare(std::span<const int> devices) {
  for (const int device : devices) {
    if (const auto lease = try_borrow({&device, 1})) lease->pipeline(device).prepare();
  }
}

bool DevicePipelines::free_locked(std::span<const int> devices) const {
  return std::ranges::none_of(devices, [&](int device) { return lent_.contains(device); });
}

DevicePipelines::Lease DevicePipelines::take_locked(std::span<const int> devices) {
  for (const int device : devices) {
    auto& pipeline = pipelines_[device];
    if (!pipeline) pipeline = std::make_unique<device::Pipeline>(runtime_.accelerator(device), limits_);
  }
  lent_.insert(devices.begin(), devices.end());
  return {*this, devices};
}

void DevicePipelines::give_back(std::span<const int> devices) {
  {
    const std::lock_guard lock(mutex_);
    for (const int device : devices) lent_.erase(device);
  }
  given_back_.notify_all();
}

device::Pipeline& DevicePipelines::pipeline(int device) {
  const std::lock_guard lock(mutex_);
  return *pipelines_.at(device);
}

MemoryRegistrar page_locking(device::Accelerator& accelerator) {
  return {[&accelerator](std::byte* address, uint64_t bytes) {
            try {
              accelerator.page_lock({address, bytes});
              std::this_thread::sleep_for(kPauseBetweenLocks);
              return true;
            } catch (const Error& error) {
              device::note("memory of snapshots could not be page-locked, so that copies from devices are slower (" +
                           std::string(error.what()) + ")");
              return false;
            }
          },
          [&accelerator](std::byte* address, uint64_t) {
            try {
              accelerator.page_unlock(address);
            } catch (const Error&) {  // the runtime is shutting down, and has unlocked everything
            }
          }};
}

DevicePipelines& cuda_pipelines(std::span<const int> devices) {
  static std::mutex mutex;
  // Leaked on purpose: threads may copy while static destructors run.
  static DevicePipelines* pipelines = nullptr;
  static std::set<int>& used = *new std::set<int>;
  static std::vector<std::string>& addresses = *new std::vector<std::string>;
  const std::lock_guard lock(mutex);
  if (pipelines != nullptr && std::ranges::all_of(devices, [&](int device) { return used.contains(device); })) {
    return *pipelines;
  }
  std::string reason;
  device::CudaRuntime* const runtime = device::cuda_runtime(reason);
  if (runtime == nullptr) throw Error::invalid(reason);
  for (const int device : devices) {
    if (used.contains(device)) continue;
    addresses.push_back(pci_address_or_none(runtime->accelerator(device)));
    used.insert(device);
  }
  snapshot_arena().prefer_node(nearest_node(addresses));
  if (pipelines == nullptr) {
    snapshot_arena().set_registrar(page_locking(runtime->accelerator(devices.front())));
    pipelines = new DevicePipelines(*runtime, {});
  }
  return *pipelines;
}

}  // namespace vescale_ckpt::stage
