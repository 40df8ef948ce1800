// A kind of device for tests of torch itself, by torch's open registration (PrivateUse1): what torch has no engine for.
//
// Its memory cannot be reached by its addresses: they lie in a mapping without access, beside one of the same pages
// that only copies of this file use. So whoever reads a tensor by its address crashes. Work of a stream is queued and
// runs when somebody waits for the stream or the device, streams in the order of their numbers: a copy that is taken
// for done too early, or that is queued on another stream than the current one, is seen. Operators run on the host,
// with copies that wait. Python's tests load it as a library (tests/harness/fake_device.py).
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <unistd.h>

#include <torch/library.h>
#include <array>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;

constexpr DeviceType kType = DeviceType::PrivateUse1;
constexpr DeviceIndex kDevices = 2;
constexpr size_t kBytes = size_t{2} << 30, kPage = 4096;

thread_local DeviceIndex current_device = 0;
thread_local std::array<c10::StreamId, kDevices> current_streams{};

struct State {
  std::mutex mutex;  // guards all below, except that no work runs under it
  std::map<std::string, int64_t> counts;
  std::array<std::map<c10::StreamId, std::deque<std::function<void()>>>, kDevices> queues;
  c10::StreamId last_stream = 0;
  std::array<std::recursive_mutex, kDevices> running;  // held while work of a device runs
  // Memory, for all devices.
  char* addresses = nullptr;  // no access
  char* pages = nullptr;
  size_t used = 0;
  std::multimap<size_t, size_t> free;  // {bytes: offset}
};
State& state = *new State;  // threads use it while the process ends

char* behind(const void* address) {
  return state.pages + (static_cast<const char*>(address) - state.addresses);
}

struct Allocator final : c10::Allocator {
  static void release(void* context) {
    auto* block = static_cast<std::pair<size_t, size_t>*>(context);
    {
      const std::lock_guard lock(state.mutex);
      madvise(state.pages + block->second, block->first, MADV_REMOVE);
      state.free.emplace(*block);
    }
    delete block;
  }
  c10::DataPtr allocate(size_t bytes) override {
    const Device device(kType, current_device);
    if (bytes == 0) return {nullptr, device};
    const size_t size = (bytes + kPage - 1) / kPage * kPage;
    const std::lock_guard lock(state.mutex);
    if (state.pages == nullptr) {
      const int file = memfd_create("fake_device", 0);
      TORCH_CHECK(file >= 0 && ftruncate(file, kBytes) == 0);
      state.addresses = static_cast<char*>(mmap(nullptr, kBytes, PROT_NONE, MAP_SHARED, file, 0));
      state.pages = static_cast<char*>(mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
      TORCH_CHECK(state.addresses != MAP_FAILED && state.pages != MAP_FAILED);
      close(file);
    }
    auto* block = new std::pair(size, state.used);
    if (const auto found = state.free.find(size); found != state.free.end()) {
      block->second = found->second;
      state.free.erase(found);
    } else {
      state.used += size;
      TORCH_CHECK(state.used <= kBytes, "the fake device is full");
    }
    return {state.addresses + block->second, block, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(behind(to), behind(from), bytes);
  }
};
Allocator& allocator = *new Allocator;

void run(DeviceIndex device, c10::StreamId stream) {
  const std::lock_guard running(state.running[device]);
  while (true) {
    std::function<void()> work;
    {
      const std::lock_guard lock(state.mutex);
      auto& queue = state.queues[device][stream];
      if (queue.empty()) return;
      work = std::move(queue.front());
      queue.pop_front();
    }
    work();
  }
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return kType; }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return {kType, current_device}; }
  void setDevice(Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  c10::Stream getStream(Device device) const override { return stream(device, current_streams[index(device)]); }
  c10::Stream getDefaultStream(Device device) const override { return stream(device, 0); }
  c10::Stream getNewStream(Device device, int) const override {
    const std::lock_guard lock(state.mutex);
    return stream(device, ++state.last_stream);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    const c10::Stream before = getStream(next.device());
    current_streams[next.device_index()] = next.id();
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  bool queryStream(const c10::Stream& of) const override {
    const std::lock_guard lock(state.mutex);
    return state.queues[of.device_index()][of.id()].empty();
  }
  void synchronizeStream(const c10::Stream& of) const override { run(of.device_index(), of.id()); }
  void synchronizeDevice(const DeviceIndex device) const override {
    std::vector<c10::StreamId> streams;
    {
      const std::lock_guard lock(state.mutex);
      for (const auto& [id, queue] : state.queues[device]) streams.push_back(id);
    }
    for (const c10::StreamId id : streams) run(device, id);
  }

 private:
  static size_t index(Device device) { return device.has_index() ? device.index() : current_device; }
  static c10::Stream stream(Device device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, Device(kType, static_cast<DeviceIndex>(index(device))), id);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::DataPtr memory = allocator.allocate(bytes);
    const size_t kept = std::min(bytes, storage.nbytes());
    if (kept != 0) std::memcpy(behind(memory.get()), behind(storage.data()), kept);
    storage.set_data_ptr_noswap(std::move(memory));
    storage.set_nbytes(bytes);
  }
};
const bool hooked = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  c10::SetAllocator(kType, &allocator);
  return true;
}();

// A view of a tensor's memory for the host, to be used only while its work runs.
Tensor on_host(void* address, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
               at::ScalarType dtype) {
  return at::from_blob(address, sizes, strides, at::TensorOptions().dtype(dtype));
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  const bool both = from.device().type() == kType && to.device().type() == kType;
  const Device device = to.device().type() == kType ? to.device() : from.device();
  const auto address = [](const Tensor& tensor) -> void* {
    return tensor.device().type() == kType ? behind(tensor.const_data_ptr())
                                           : const_cast<void*>(tensor.const_data_ptr());
  };
  if (from.numel() == 0) return to;
  // The device keeps its own memory; that of the host is the caller's, as with any device.
  std::vector<c10::Storage> kept;
  for (const Tensor& tensor : {from, to}) {
    if (tensor.device().type() == kType) kept.push_back(tensor.storage());
  }
  const c10::StreamId stream = current_streams[device.index()];
  {
    const std::lock_guard lock(state.mutex);
    ++state.counts[both ? "copies on devices" : to.device().type() == kType ? "copies to devices" : "copies to host"];
    if (!both && !non_blocking) ++state.counts["copies that were waited for"];
    state.queues[device.index()][stream].push_back(
        [kept, source = address(from), target = address(to), sizes = from.sizes().vec(), strides = from.strides().vec(),
         to_sizes = to.sizes().vec(), to_strides = to.strides().vec(), dtype = from.scalar_type(),
         to_dtype = to.scalar_type(), bytes = from.nbytes(),
         flat = from.is_contiguous() && to.is_contiguous() && from.sizes() == to.sizes()] {
          if (flat && dtype == to_dtype) {
            std::memcpy(target, source, bytes);
          } else {
            on_host(target, to_sizes, to_strides, to_dtype).copy_(on_host(source, sizes, strides, dtype));
          }
        });
  }
  if (!both && !non_blocking) run(device.index(), stream);
  return to;
}

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device.value_or(Device(kType)));
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   dtype.value_or(at::kFloat), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(device.value_or(Device(kType)));
  return at::detail::empty_strided_generic(size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           dtype.value_or(at::kFloat));
}

Tensor as_strided(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

Tensor view(const Tensor& self, c10::IntArrayRef size) {
  return at::native::view(self, size);
}

Tensor reshape_alias(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::as_strided_tensorimpl(self, size, stride, std::nullopt);
}

Tensor& set_storage(Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}

const Tensor& resize(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  const size_t needed = (self.storage_offset() + self.numel()) * self.itemsize();
  if (self.storage().nbytes() < needed)
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  return self;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  resize(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

void cpu_fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &as_strided);
  library.impl("view", &view);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("resize_", &resize);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&cpu_fallback>());
}

TORCH_LIBRARY(fake_device, library) {
  library.def("count(str what) -> int", [](const std::string& what) {
    const std::lock_guard lock(state.mutex);
    return state.counts[what];
  });
  library.def("reset() -> ()", [] {
    const std::lock_guard lock(state.mutex);
    state.counts.clear();
  });
  library.def("queued(int device) -> int", [](int64_t device) {
    const std::lock_guard lock(state.mutex);
    int64_t all = 0;
    for (const auto& [id, queue] : state.queues.at(static_cast<size_t>(device)))
      all += static_cast<int64_t>(queue.size());
    return all;
  });
  library.def("set_device(int device) -> ()",
              [](int64_t device) { current_device = static_cast<DeviceIndex>(device); });
  library.def("current_device() -> int", [] { return static_cast<int64_t>(current_device); });
}
