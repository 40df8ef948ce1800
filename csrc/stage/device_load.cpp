#include "stage/device_load.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/workers.h"
#include "device/cuda.h"

namespace vescale_ckpt::stage {
namespace {

// Shorter runs are packed: a separate copy takes longer than moving so many bytes within the host's memory.
constexpr uint64_t kLeastCopy = 4 << 10;

constexpr uint64_t kSlots = 16;  // of LoadStreams

}  // namespace

LoadStreams::LoadStreams(device::DeviceRuntime& runtime) : runtime_(runtime), slots_(kSlotBytes, kSlots * kSlotBytes) {}

LoadStreams::~LoadStreams() {
  for (const auto& [memory, device] : locked_) {
    try {
      runtime_.accelerator(device).page_unlock(memory);
    } catch (const Error&) {  // the runtime is shutting down, and has unlocked everything
    }
  }
}

std::unique_ptr<LoadStream> LoadStreams::borrow(int device) {
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = idle_.find(device); found != idle_.end()) {
      auto stream = std::move(found->second);
      idle_.erase(found);
      return stream;
    }
  }
  auto stream = std::make_unique<LoadStream>();
  stream->device = device;
  stream->copies = runtime_.accelerator(device).make_stream(device::Priority::normal);
  return stream;
}

void LoadStreams::give_back(std::unique_ptr<LoadStream> stream) {
  const std::lock_guard lock(mutex_);
  const int device = stream->device;
  idle_.emplace(device, std::move(stream));
}

std::unique_ptr<device::Event> LoadStreams::make_event(int device) {
  return runtime_.accelerator(device).make_event();
}

void LoadStreams::lock(int device, std::span<std::byte> memory) {
  {
    const std::lock_guard lock(mutex_);
    if (!tried_.insert(memory.data()).second) return;
  }
  try {
    runtime_.accelerator(device).page_lock(memory);
    const std::lock_guard lock(mutex_);
    locked_[memory.data()] = device;
  } catch (const Error& error) {
    device::note("memory that loads read into could not be page-locked, so that copies to devices are slower (" +
                 std::string(error.what()) + ")");
  }
}

LoadStreams& cuda_load_streams() {
  static std::mutex mutex;
  static LoadStreams* streams = nullptr;  // leaked on purpose: threads may copy while static destructors run
  const std::lock_guard lock(mutex);
  if (streams != nullptr) return *streams;
  std::string reason;
  device::CudaRuntime* const runtime = device::cuda_runtime(reason);
  if (runtime == nullptr) throw Error::invalid(reason);
  return *(streams = new LoadStreams(*runtime));
}

// Packs data that cannot be copied in place, and collects copies.
class DeviceLoad::Slots final : public read::DeviceSink::Batch {
 public:
  explicit Slots(DeviceLoad& load) : load_(load) {}

  void add(const read::ReadItem& item, const std::byte* body, uint64_t begin, uint64_t end) override {
    begin_item();
    item.box.runs_in_memory(begin, end, [&](uint64_t at, int64_t memory, uint64_t bytes) {
      const std::byte* host = body + (at - begin);
      if (bytes >= kLeastCopy) {
        join(copies_[item.device], address(item.memory, memory), host, bytes, joins_copies_);
      } else {
        pack(item.device, address(item.memory, memory), host, bytes);
      }
    });
  }

  void add_packed(const io::BoxCopy& copy, int device) {
    begin_item();
    copy.box.runs_in_memory(copy.box.begin(), copy.box.end(), [&](uint64_t at, int64_t memory, uint64_t bytes) {
      pack(device, address(copy.memory, memory), copy.piece + at, bytes);
    });
  }

  void send(Slot slot) override {
    load_.send(copies_, std::move(slot));
    send_packed();
  }

  void send_packed() {
    if (packed_.empty()) return;
    Slot slot = std::move(*slot_);
    slot_.reset();
    used_ = 0;
    load_.send(std::exchange(packed_, {}), std::move(slot));
  }

 private:
  static device::DeviceAddress address(const std::byte* memory, int64_t offset) {
    return reinterpret_cast<uintptr_t>(memory) + static_cast<uint64_t>(offset);
  }

  // Only copies of one item are joined: the device refuses a copy over the border of two allocations, however close
  // they are.
  void begin_item() { joins_copies_ = joins_packed_ = false; }

  static void join(std::vector<device::FlatCopy>& copies, device::DeviceAddress device, const std::byte* host,
                   uint64_t bytes, bool& joins) {
    if (std::exchange(joins, true) && !copies.empty()) {
      device::FlatCopy& last = copies.back();
      if (last.device + last.bytes == device && last.host + last.bytes == host) {
        last.bytes += bytes;
        return;
      }
    }
    copies.push_back({device, const_cast<std::byte*>(host), bytes});  // copies to the device do not write it
  }

  void pack(int device, device::DeviceAddress to, const std::byte* host, uint64_t bytes) {
    while (bytes != 0) {
      if (used_ == LoadStreams::kSlotBytes) send_packed();  // a thread that waits for a slot must hold no packed slot
      if (!slot_) {
        slot_.emplace(load_.streams_.slots().acquire());
        load_.streams_.lock(device, {slot_->data(), LoadStreams::kSlotBytes});
      }
      const uint64_t some = std::min(bytes, LoadStreams::kSlotBytes - used_);
      std::memcpy(slot_->data() + used_, host, some);
      join(packed_[device], to, slot_->data() + used_, some, joins_packed_);
      used_ += some;
      to += some;
      host += some;
      bytes -= some;
    }
  }

  DeviceLoad& load_;
  Copies copies_;
  Copies packed_;
  std::optional<Slot> slot_;  // the slot of packed_
  uint64_t used_ = 0;
  bool joins_copies_ = false, joins_packed_ = false;  // whether the last copy is of the same item
};

DeviceLoad::DeviceLoad(LoadStreams& streams, std::span<const Producer> producers) : streams_(streams) {
  for (const Producer& producer : producers) {
    auto& stream = borrowed_[producer.device];
    if (!stream) stream = streams_.borrow(producer.device);
    auto produced = streams_.make_event(producer.device);
    produced->record(producer.stream);
    stream->copies->after(*produced);
  }
  thread_ = std::jthread([this] { give_slots_back(); });
}

DeviceLoad::~DeviceLoad() {
  end();
}

void DeviceLoad::prepare(std::span<std::byte> slot) {
  if (!borrowed_.empty()) streams_.lock(borrowed_.begin()->first, slot);
}

std::unique_ptr<read::DeviceSink::Batch> DeviceLoad::begin() {
  return std::make_unique<Slots>(*this);
}

void DeviceLoad::copy(std::span<const io::BoxCopy> copies, std::span<const int64_t> devices, unsigned threads) {
  if (copies.size() != devices.size()) throw Error::invalid("not a device for each copy");
  std::atomic<size_t> next{0};
  const auto count = static_cast<unsigned>(std::min<size_t>(threads, copies.size()));
  if (count == 0) return;
  run_workers(count, [&](const std::atomic<bool>& stop) {
    Slots slots(*this);
    size_t number = 0;
    try {
      for (size_t taken = next++; taken < copies.size() && !stop; taken = next++) {
        number = taken;
        if (devices[number] >= 0) slots.add_packed(copies[number], static_cast<int>(devices[number]));
      }
      slots.send_packed();
    } catch (const Error& error) {
      throw error.of_item(static_cast<int64_t>(number));
    }
  });
}

void DeviceLoad::finish() {
  end();
  const std::lock_guard lock(mutex_);
  if (error_) std::rethrow_exception(error_);
}

LoadStream& DeviceLoad::stream_of(int device) {
  const auto found = borrowed_.find(device);
  if (found == borrowed_.end()) throw Error::invalid("copies to device " + std::to_string(device) + " after no stream");
  return *found->second;
}

void DeviceLoad::send(const Copies& copies, Slot slot) {
  const auto shared = std::make_shared<Slot>(std::move(slot));
  for (const auto& [device, of_device] : copies) queue(stream_of(device), of_device, shared);
}

void DeviceLoad::queue(LoadStream& stream, std::span<const device::FlatCopy> copies, std::shared_ptr<Slot> slot) {
  std::unique_ptr<device::Event> done;
  {
    const std::lock_guard lock(stream.mutex);
    if (stream.events.empty()) stream.events.push_back(streams_.make_event(stream.device));
    done = std::move(stream.events.back());
    stream.events.pop_back();
    try {
      stream.copies->copy_to_device(copies);
      stream.copies->record(*done);
    } catch (...) {
      try {
        stream.copies->drain();  // queued copies may still read the slot
      } catch (...) {            // the first error is reported, and the stream is empty in any case
      }
      throw;
    }
  }
  const std::lock_guard lock(mutex_);
  in_flight_.push_back({&stream, std::move(done), std::move(slot)});
  changed_.notify_all();
}

void DeviceLoad::give_slots_back() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return ended_ || !in_flight_.empty(); });
    if (in_flight_.empty()) return;
    InFlight oldest = std::move(in_flight_.front());
    in_flight_.pop_front();
    lock.unlock();
    std::exception_ptr error;
    try {
      oldest.done->wait();
    } catch (...) {
      error = std::current_exception();
    }
    const std::lock_guard stream_lock(oldest.stream->mutex);
    if (error) {
      try {
        oldest.stream->copies->drain();
      } catch (...) {
      }
    }
    oldest.stream->events.push_back(std::move(oldest.done));
    oldest.slot.reset();
    lock.lock();
    if (error && !error_) error_ = error;
  }
}

void DeviceLoad::end() noexcept {
  {
    const std::lock_guard lock(mutex_);
    ended_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
  for (auto& [device, stream] : borrowed_) {
    if (!error_) streams_.give_back(std::move(stream));
  }
  borrowed_.clear();
}

std::unique_ptr<DeviceLoad> device_load(std::span<const int64_t> devices, std::span<const Producer> producers) {
  if (std::ranges::all_of(devices, [](int64_t device) { return device < 0; })) return nullptr;
  return std::make_unique<DeviceLoad>(cuda_load_streams(), producers);
}

void copy_boxes(std::span<const io::BoxCopy> copies, std::span<const int64_t> devices,
                std::span<const Producer> producers, unsigned threads) {
  const auto load = device_load(devices, producers);
  if (!load) return io::copy_boxes(copies, threads);
  load->copy(copies, devices, threads);
  std::vector<io::BoxCopy> on_host;
  for (size_t row = 0; row < copies.size(); ++row) {
    if (devices[row] < 0) on_host.push_back(copies[row]);
  }
  io::copy_boxes(on_host, threads);
  load->finish();
}

}  // namespace vescale_ckpt::stage
