#include "device/fake_device.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "device/pack_rows.h"

namespace vescale_ckpt::device {
namespace {

constexpr DeviceAddress kTag = DeviceAddress{0xD} << 60;  // no address of the host looks like this
constexpr unsigned kDeviceShift = 48;

[[noreturn]] void refuse(const std::string& operation) {
  throw Error::device(operation, "fake: invalid argument", 1);
}

}  // namespace

FakeQueue::~FakeQueue() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    held_ = false;
  }
  changed_.notify_all();
}

void FakeQueue::push(std::function<void()> work) {
  {
    const std::lock_guard lock(mutex_);
    work_.push_back(std::move(work));
  }
  changed_.notify_all();
}

void FakeQueue::drain() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return work_.empty() && !running_; });
}

void FakeQueue::hold() {
  const std::lock_guard lock(mutex_);
  held_ = true;
}

void FakeQueue::release() {
  {
    const std::lock_guard lock(mutex_);
    held_ = false;
  }
  changed_.notify_all();
}

void FakeQueue::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return (closed_ && work_.empty()) || (!held_ && !work_.empty()); });
    if (work_.empty()) return;
    const std::function<void()> work = std::move(work_.front());
    work_.pop_front();
    running_ = true;
    lock.unlock();
    work();
    lock.lock();
    running_ = false;
    changed_.notify_all();
  }
}

class FakeEvent final : public Event {
 public:
  struct State {
    std::mutex mutex;  // guards all below
    std::condition_variable changed;
    uint64_t recorded = 0, passed = 0;

    void wait_for(uint64_t record) {
      std::unique_lock lock(mutex);
      changed.wait(lock, [&] { return passed >= record; });
    }
  };

  FakeEvent(FakeRuntime& runtime, int device) : runtime_(runtime), device_(device) { ++runtime_.live_objects_; }
  ~FakeEvent() override { --runtime_.live_objects_; }

  void record(StreamHandle producer) override {
    runtime_.maybe_fail(Fault::record_producer, "record an event");
    record_on(runtime_.producer(device_, producer));
  }

  void record_on(FakeQueue& queue) {
    queue.push([state = state_, record = next_record()] {
      const std::lock_guard lock(state->mutex);
      state->passed = std::max(state->passed, record);
      state->changed.notify_all();
    });
  }

  void wait() override {
    runtime_.maybe_fail(Fault::wait, "wait for copies");
    state_->wait_for(recorded());
    if (runtime_.broken_[static_cast<size_t>(device_)]) {
      throw Error::device("wait for copies", "fake: the device failed", 2);
    }
  }

  uint64_t recorded() const {
    const std::lock_guard lock(state_->mutex);
    return state_->recorded;
  }
  std::shared_ptr<State> state() const { return state_; }

 private:
  uint64_t next_record() {
    const std::lock_guard lock(state_->mutex);
    return ++state_->recorded;
  }

  FakeRuntime& runtime_;
  const int device_;
  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

class FakeSlab final : public Slab {
 public:
  FakeSlab(FakeRuntime& runtime, int device, uint64_t bytes)
      : runtime_(runtime), address_(runtime.allocate(device, bytes, std::byte{0xEE})), bytes_(bytes) {
    ++runtime_.live_objects_;
  }
  ~FakeSlab() override {
    const std::lock_guard lock(runtime_.mutex_);
    runtime_.allocations_.erase(address_);
    --runtime_.live_objects_;
  }
  DeviceAddress address() const override { return address_; }
  uint64_t bytes() const { return bytes_; }

  PackTable table;  // read by the stream later: who packs again too early changes it under the kernel

 private:
  FakeRuntime& runtime_;
  const DeviceAddress address_;
  const uint64_t bytes_;
};

class FakeStream final : public CopyStream {
 public:
  FakeStream(FakeRuntime& runtime, int device) : runtime_(runtime), device_(device) { ++runtime_.live_objects_; }
  ~FakeStream() override {
    queue_.drain();
    --runtime_.live_objects_;
  }

  void after(const Event& event) override {
    runtime_.maybe_fail(Fault::after, "order copies after an event");
    const auto& fake = static_cast<const FakeEvent&>(event);
    queue_.push([state = fake.state(), record = fake.recorded()] { state->wait_for(record); });
  }

  void record(Event& event) override {
    runtime_.maybe_fail(Fault::record, "record an event");
    static_cast<FakeEvent&>(event).record_on(queue_);
  }

  void copy(std::span<const FlatCopy> copies) override {
    runtime_.maybe_fail(Fault::copy, "copy");
    for (const FlatCopy& copy : copies) {
      const std::byte* device = runtime_.memory(device_, copy.device, copy.bytes, "copy");
      check_host(copy.host, copy.bytes);
      to_host(copy.host, copy.bytes, [=] { std::memcpy(copy.host, device, copy.bytes); });
    }
  }

  void copy(const PitchedCopy& copy) override {
    runtime_.maybe_fail(Fault::copy_pitched, "copy runs");
    if (copy.width > copy.device_pitch || copy.width > copy.host_pitch) refuse("copy runs");
    const std::byte* device =
        runtime_.memory(device_, copy.device, (copy.height - 1) * copy.device_pitch + copy.width, "copy runs");
    const uint64_t host_bytes = (copy.height - 1) * copy.host_pitch + copy.width;
    check_host(copy.host, host_bytes);
    to_host(copy.host, host_bytes, [=] {
      for (uint64_t i = 0; i < copy.height; ++i) {
        std::memcpy(copy.host + i * copy.host_pitch, device + i * copy.device_pitch, copy.width);
      }
    });
  }

  void copy_to_device(std::span<const FlatCopy> copies) override {
    runtime_.maybe_fail(Fault::copy, "copy to the device");
    for (const FlatCopy& copy : copies) {
      std::byte* device = runtime_.memory(device_, copy.device, copy.bytes, "copy to the device");
      check_host(copy.host, copy.bytes);
      on_device([=] { std::memcpy(device, copy.host, copy.bytes); });
    }
  }

  void pack(Slab& slab, const PackTable& table) override {
    runtime_.maybe_fail(Fault::pack, "pack");
    auto& fake = static_cast<FakeSlab&>(slab);
    if (table.bytes > fake.bytes() || table.rows.size() > kPackRows || table.dims.size() > kPackDims) refuse("pack");
    fake.table = table;
    uint64_t end = 0;
    for (PackRow& row : fake.table.rows) {
      if (row.offset < end || row.bytes == 0) refuse("pack");
      end = row.offset + row.bytes;
      row.address = reinterpret_cast<uintptr_t>(resolve(row, fake.table.dims));
    }
    if (end != table.bytes) refuse("pack");
    auto* data = reinterpret_cast<char*>(runtime_.memory(device_, fake.address(), fake.bytes(), "pack"));
    on_device([data, &fake] {
      const PackTable& table = fake.table;
      const auto row_count = static_cast<uint32_t>(table.rows.size());
      for (uint32_t piece = 0; piece * kPackPieceBytes < table.bytes; ++piece) {
        for (uint32_t lane = 0; lane < kPackLanes; ++lane) {
          copy_piece(data, table.rows.data(), row_count, table.dims.data(), table.bytes, piece, lane);
        }
      }
    });
  }

  void drain() override {
    queue_.drain();
    runtime_.maybe_fail(Fault::drain, "wait for a stream");
  }

 private:
  // Where the row begins, after a look at all that it reaches.
  std::byte* resolve(const PackRow& row, const std::vector<PackDim>& dims) {
    if (row.dims == 0) return runtime_.memory(device_, row.address, row.bytes, "pack");
    int64_t low = 0, high = row.unit;
    for (uint32_t dim = row.dims_at; dim < row.dims_at + row.dims; ++dim) {
      const int64_t reach = static_cast<int64_t>(dims[dim].count - 1) * dims[dim].stride;
      (reach < 0 ? low : high) += reach;
    }
    const DeviceAddress lowest = row.address + static_cast<uint64_t>(low);
    return runtime_.memory(device_, lowest, static_cast<uint64_t>(high - low), "pack") - low;
  }

  // A copy lies in one locked piece, or in none.
  void check_host(const std::byte* host, uint64_t bytes) {
    const std::lock_guard lock(runtime_.mutex_);
    bool locked = false;
    for (const auto& [begin, size] : runtime_.locked_) {
      const bool inside = host >= begin && host + bytes <= begin + size;
      const bool outside = host >= begin + size || host + bytes <= begin;
      if (!inside && !outside) refuse("copy over the border of page-locked memory");
      locked |= inside;
    }
    if (!locked) ++runtime_.unlocked_copies_;
  }

  void to_host(const std::byte* host, uint64_t bytes, std::function<void()> copy) {
    std::multimap<const std::byte*, uint64_t>::iterator place;
    {
      const std::lock_guard lock(runtime_.mutex_);
      place = runtime_.under_copies_.emplace(host, bytes);
    }
    on_device(std::move(copy), [this, place] {
      const std::lock_guard lock(runtime_.mutex_);
      runtime_.under_copies_.erase(place);
      ++runtime_.copies_to_host_;
    });
  }

  void on_device(std::function<void()> work, std::function<void()> done = [] {}) {
    ++runtime_.copies_in_flight_;
    queue_.push([this, work = std::move(work), done = std::move(done)] {
      auto& broken = runtime_.broken_[static_cast<size_t>(device_)];
      try {
        if (!broken) runtime_.maybe_fail(Fault::on_device, "on the device");
      } catch (const Error&) {
        broken = true;
      }
      if (!broken) work();
      done();
      --runtime_.copies_in_flight_;
    });
  }

  FakeRuntime& runtime_;
  const int device_;
  FakeQueue queue_;
};

class FakeAccelerator final : public Accelerator {
 public:
  FakeAccelerator(FakeRuntime& runtime, int device) : runtime_(runtime), device_(device) {}

  std::string pci_address() const override { return "0000:0" + std::to_string(device_) + ":00.0"; }
  bool has_kernel() override { return runtime_.kernels_; }

  std::unique_ptr<CopyStream> make_stream(Priority) override {
    runtime_.maybe_fail(Fault::make_stream, "make a stream");
    return std::make_unique<FakeStream>(runtime_, device_);
  }
  std::unique_ptr<Event> make_event() override {
    runtime_.maybe_fail(Fault::make_event, "make an event");
    return std::make_unique<FakeEvent>(runtime_, device_);
  }
  std::unique_ptr<Slab> make_slab(uint64_t bytes) override {
    if (!runtime_.kernels_) return nullptr;
    try {
      runtime_.maybe_fail(Fault::make_slab, "make a slab");
    } catch (const Error&) {
      return nullptr;  // no memory
    }
    return std::make_unique<FakeSlab>(runtime_, device_, bytes);
  }
  void page_lock(std::span<std::byte> memory) override {
    runtime_.maybe_fail(Fault::page_lock, "page-lock");
    const std::lock_guard lock(runtime_.mutex_);
    if (!runtime_.locked_.emplace(memory.data(), memory.size()).second) refuse("page-lock");
    runtime_.look_for_copies_locked(memory.data(), memory.size());
  }
  void page_unlock(std::byte* memory) override {
    const std::lock_guard lock(runtime_.mutex_);
    const auto found = runtime_.locked_.find(memory);
    if (found == runtime_.locked_.end()) refuse("unlock pages");
    runtime_.look_for_copies_locked(memory, found->second);
    runtime_.locked_.erase(found);
  }

 private:
  FakeRuntime& runtime_;
  const int device_;
};

FakeRuntime::FakeRuntime(int devices, bool kernels) : kernels_(kernels), broken_(static_cast<size_t>(devices)) {
  for (int device = 0; device < devices; ++device) {
    devices_.push_back(std::make_unique<FakeAccelerator>(*this, device));
    defaults_.push_back(std::make_unique<FakeQueue>());
  }
}

FakeRuntime::~FakeRuntime() = default;

Accelerator& FakeRuntime::accelerator(int device) {
  return *devices_.at(static_cast<size_t>(device));
}

std::optional<int> FakeRuntime::device_of(DeviceAddress address) const {
  if (address >> 60 != kTag >> 60) return std::nullopt;
  return static_cast<int>(address >> kDeviceShift & 0xFFF);
}

DeviceAddress FakeRuntime::allocate(int device, uint64_t bytes, std::byte fill) {
  const DeviceAddress address = allocate_neighbours(device, {bytes}).front();
  std::memset(memory(address, bytes), static_cast<int>(fill), bytes);
  return address;
}

std::vector<DeviceAddress> FakeRuntime::allocate_neighbours(int device, const std::vector<uint64_t>& bytes) {
  const auto memory =
      std::make_shared<std::vector<std::byte>>(std::accumulate(bytes.begin(), bytes.end(), uint64_t{0}));
  std::vector<DeviceAddress> addresses;
  std::span<std::byte> rest = *memory;
  const std::lock_guard lock(mutex_);
  for (const uint64_t own : bytes) {
    addresses.push_back(kTag | static_cast<DeviceAddress>(device) << kDeviceShift |
                        reinterpret_cast<uintptr_t>(rest.data()));
    allocations_[addresses.back()] = {memory, rest.first(own)};
    rest = rest.subspan(own);
  }
  return addresses;
}

std::byte* FakeRuntime::memory(int device, DeviceAddress address, uint64_t bytes, const std::string& operation) {
  const std::lock_guard lock(mutex_);
  auto after = allocations_.upper_bound(address);
  if (device_of(address) != device || after == allocations_.begin()) refuse(operation);
  const auto& [start, allocation] = *--after;
  const uint64_t size = allocation.own.size();
  if (address - start > size || bytes > size - (address - start)) refuse(operation);
  return allocation.own.data() + (address - start);
}

std::byte* FakeRuntime::memory(DeviceAddress address, uint64_t bytes) {
  return memory(device_of(address).value(), address, bytes, "look at memory");
}

void FakeRuntime::look_for_copies_locked(const std::byte* memory, uint64_t bytes) {
  for (const auto& [host, copied] : under_copies_) {
    if (host < memory + bytes && memory < host + copied) ++locks_under_copies_;
  }
}

StreamHandle FakeRuntime::make_producer() {
  producers_.push_back(std::make_unique<FakeQueue>());
  return producers_.size();
}

FakeQueue& FakeRuntime::producer(int device, StreamHandle handle) {
  return handle == 0 ? *defaults_.at(static_cast<size_t>(device)) : *producers_.at(handle - 1);
}

void FakeRuntime::fail(Fault fault, uint64_t skip) {
  const std::lock_guard lock(mutex_);
  faults_[static_cast<size_t>(fault)] = skip;
  happened_ = false;
}

void FakeRuntime::clear_faults() {
  const std::lock_guard lock(mutex_);
  faults_.fill(std::nullopt);
  calls_.fill(0);
  for (auto& broken : broken_) broken = false;
}

uint64_t FakeRuntime::calls(Fault fault) {
  const std::lock_guard lock(mutex_);
  return calls_[static_cast<size_t>(fault)];
}

void FakeRuntime::maybe_fail(Fault fault, const std::string& operation) {
  const std::lock_guard lock(mutex_);
  ++calls_[static_cast<size_t>(fault)];
  auto& skip = faults_[static_cast<size_t>(fault)];
  if (!skip || (*skip)-- != 0) return;
  skip.reset();
  happened_ = true;
  throw Error::device(operation, "fake: injected", 7);
}

}  // namespace vescale_ckpt::device
