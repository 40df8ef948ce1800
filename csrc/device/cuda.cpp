#include "device/cuda.h"

#include <algorithm>
#include <array>
#include <atomic>

#include "base/error.h"
#include "device/cuda_device.h"
#include "device/cuda_stream.h"

namespace vescale_ckpt::device {
namespace {

using cuda::Api;
using cuda::check;
using cuda::check_before_copies;
using cuda::Current;
using cuda::kSuccess;

std::atomic<bool> started{false};

struct Notes {
  std::mutex mutex;
  std::vector<std::string> texts;
};

// Leaked on purpose: threads may copy while static destructors run.
Notes& all_notes() {
  static Notes& notes = *new Notes;
  return notes;
}

class CudaAccelerator final : public Accelerator {
 public:
  CudaAccelerator(const Api& api, cuda::Batches& batches, int index, const unsigned char* kernels)
      : device_{api, batches, index, "device " + std::to_string(index)}, kernels_(kernels) {
    check_before_copies(device_, api.device_get(&handle_, index), [&] { return "find " + device_.name; });
    check_before_copies(device_, api.context_retain(&device_.context, handle_), [&] { return "use " + device_.name; });
    device_.batches = can_take_batches();
  }
  ~CudaAccelerator() override {
    if (module_ != nullptr) cuda::on_device_if_usable(device_, [&] { device_.api.module_unload(module_); });
    device_.api.context_release(handle_);
  }
  CudaAccelerator(const CudaAccelerator&) = delete;
  CudaAccelerator& operator=(const CudaAccelerator&) = delete;

  std::string pci_address() const override {
    std::array<char, 32> address{};
    check(device_.api, device_.api.pci_address(address.data(), static_cast<int>(address.size()), device_.index),
          [&] { return "ask for the PCI address of " + device_.name; });
    return address.data();
  }

  std::unique_ptr<CopyStream> make_stream(Priority priority) override {
    return std::make_unique<CudaStream>(device_, priority);
  }
  std::unique_ptr<Event> make_event() override { return std::make_unique<CudaEvent>(device_); }

  std::unique_ptr<Slab> make_slab(uint64_t bytes) override {
    const Current current(device_);
    if (!load_kernels()) return nullptr;
    void *memory = nullptr, *table = nullptr;
    int code = device_.api.allocate(&memory, bytes + CudaSlab::kTableBytes);
    if (code == kSuccess) {
      code = device_.api.host_allocate(&table, CudaSlab::kTableBytes, cuda::kHostPortable);
      if (code != kSuccess) device_.api.release(memory);
    }
    if (code == cuda::kOutOfMemory) {
      note(device_.name + " has no " + std::to_string(((bytes + CudaSlab::kTableBytes - 1) >> 20) + 1) +
           " MiB for a kernel's table and result: small tensors are copied one by one, and fingerprints taken on the " +
           "host (" + cuda::error_text(device_.api, code) + ")");
      return nullptr;
    }
    check_before_copies(device_, code, [&] { return "allocate a slab on " + device_.name; });
    return std::make_unique<CudaSlab>(device_, memory, table, bytes);
  }

  void page_lock(std::span<std::byte> memory) override {
    const Current current(device_);
    const int code = device_.api.host_register(memory.data(), memory.size(), cuda::kHostPortable);
    if (code != kSuccess && !device_.batches_of_all.lock_refused.exchange(true)) {
      note("a page lock was refused, so that copies from and to devices are made one by one from now on");
    }
    check(device_.api, code, [&] { return "page-lock " + std::to_string(memory.size()) + " bytes"; });
  }

  void page_unlock(std::byte* memory) override {
    const Current current(device_);
    check(device_.api, device_.api.host_unregister(memory), [] { return "unlock pages"; });
  }

 private:
  // Batches use addresses of host memory without translation. If locked memory has other addresses on the device, a
  // batch is an illegal access, from which a process cannot recover.
  bool can_take_batches() const {
    const Api& api = device_.api;
    if (api.copy_batch_12 == nullptr && api.copy_batch_13 == nullptr) return false;
    int as_it_is = 0, driver = 0;
    int code = api.device_attribute(&as_it_is, cuda::kRegisteredMemoryAsItIs, device_.index);
    if (code == kSuccess) code = api.driver_version(&driver);
    if (code == kSuccess && as_it_is != 0 && driver >= cuda::kFirstWithBatches) return true;
    const std::string reason = code != kSuccess ? cuda::error_text(api, code)
                               : as_it_is == 0  ? "it has addresses of its own for locked host memory"
                                                : "its driver is older than CUDA 12.8";
    note(device_.name + " takes no batches of copies, so that each tensor is a copy of its own (" + reason + ")");
    return false;
  }

  // Whether there are kernels. The image may be for other devices, or for a later driver.
  bool load_kernels() {
    const std::lock_guard lock(mutex_);
    if (kernels_ == nullptr || tried_) return device_.pack != nullptr;
    tried_ = true;
    const Api& api = device_.api;
    int code = api.module_load(&module_, kernels_);
    if (code == kSuccess) code = api.module_function(&device_.sum_words, module_, "vescale_ckpt_sum_words");
    if (code == kSuccess) code = api.module_function(&device_.pack, module_, "vescale_ckpt_pack");
    if (code != kSuccess) {
      device_.pack = nullptr;
      note(device_.name +
           " does not take the kernels: small tensors are copied one by one, and fingerprints taken on " +
           "the host (" + cuda::error_text(api, code) + ")");
    }
    return device_.pack != nullptr;
  }

  cuda::Device device_;
  const unsigned char* const kernels_;
  int handle_ = 0;
  std::mutex mutex_;  // guards the two below and the kernels in device_, which are constant once there is a slab
  bool tried_ = false;
  void* module_ = nullptr;
};

}  // namespace

CudaRuntime::CudaRuntime(const Api& api, const unsigned char* kernels) : api_(api), kernels_(kernels) {
  check(api_, api_.get_device_count(&device_count_), [] { return "ask for devices"; });
  accelerators_.resize(static_cast<size_t>(device_count_));
}

CudaRuntime::~CudaRuntime() = default;

Accelerator& CudaRuntime::accelerator(int device) {
  if (device < 0 || device >= device_count_) {
    throw Error::invalid("device " + std::to_string(device) + " of " + std::to_string(device_count_));
  }
  const std::lock_guard lock(mutex_);
  auto& accelerator = accelerators_[static_cast<size_t>(device)];
  if (!accelerator) accelerator = std::make_unique<CudaAccelerator>(api_, batches_, device, kernels_);
  return *accelerator;
}

void CudaRuntime::enable_batches(bool enabled) {
  batches_.enabled = enabled;
  if (!enabled) note("copies from and to devices are made one by one (VESCALE_CKPT_COPY_BATCHES=0)");
}

const unsigned char* kernel_image() {
#ifdef VESCALE_CKPT_HAVE_KERNEL_IMAGE
  alignas(16) static constexpr unsigned char kImage[] = {
#include "kernel_image.inc"  // written by setup.py
  };
  return kImage;
#else
  return nullptr;
#endif
}

bool cuda_was_started() {
  return started;
}

CudaRuntime* cuda_runtime(std::string& reason) {
  started = true;
  static std::mutex mutex;
  static CudaRuntime* runtime = nullptr;  // leaked on purpose: threads may copy while static destructors run
  const std::lock_guard lock(mutex);
  if (runtime != nullptr) return runtime;
  reason.clear();
  // One runtime may be too new for the driver while another one works.
  for (const bool loaded : {true, false}) {
    for (void* const found : cuda::runtimes(loaded)) {
      std::string refusal;
      try {
        Api api;
        if (cuda::load(found, api, refusal)) {
          return runtime = new CudaRuntime(api, kernel_image());
        }
      } catch (const Error& error) {
        refusal = error.what();
      }
      if (reason.empty()) reason = refusal;
    }
  }
  if (reason.empty()) reason = "no runtime of CUDA: neither libcudart.so.13 nor libcudart.so.12 is loaded or found";
  return nullptr;
}

void note(const std::string& text) {
  Notes& notes = all_notes();
  const std::lock_guard lock(notes.mutex);
  if (std::ranges::find(notes.texts, text) == notes.texts.end()) notes.texts.push_back(text);
}

std::vector<std::string> notes() {
  Notes& notes = all_notes();
  const std::lock_guard lock(notes.mutex);
  return notes.texts;
}

}  // namespace vescale_ckpt::device
