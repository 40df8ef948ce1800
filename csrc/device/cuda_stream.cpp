#include "device/cuda_stream.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "device/cuda.h"
#include "device/pack_rows.h"

namespace vescale_ckpt::device {
namespace {

using cuda::check;
using cuda::check_before_copies;
using cuda::Current;
using cuda::kSuccess;

}  // namespace

CudaEvent::CudaEvent(const cuda::Device& device) : device_(device) {
  const Current current(device);
  check_before_copies(device, device.api.event_create(&handle_, cuda::kEventBlockingSync | cuda::kEventDisableTiming),
                      [&] { return "make an event on " + device.name; });
}

CudaEvent::~CudaEvent() {
  cuda::on_device_if_usable(device_, [&] { device_.api.event_destroy(handle_); });
}

void CudaEvent::record(StreamHandle producer) {
  const Current current(device_);  // the default stream belongs to the current device
  // The copies behind the event would become a part of the user's graph.
  int status = cuda::kNotCaptured;
  const auto stream = reinterpret_cast<cuda::Stream>(producer);
  check_before_copies(device_, device_.api.stream_is_captured(stream, &status),
                      [&] { return "ask whether a stream of " + device_.name + " is captured"; });
  if (status != cuda::kNotCaptured) {
    throw Error::device(
        "copy tensors of " + device_.name,
        "the current stream is being captured into a CUDA graph: save and load before or after the capture", 0);
  }
  check_before_copies(device_, device_.api.event_record(handle_, stream),
                      [&] { return "record an event on a stream of " + device_.name; });
}

void CudaEvent::record_on(cuda::Stream own) {
  const Current current(device_);
  check(device_.api, device_.api.event_record(handle_, own),
        [&] { return "record an event behind copies on " + device_.name; });
}

void CudaEvent::wait() {
  const Current current(device_);
  check(device_.api, device_.api.event_synchronize(handle_), [&] { return "wait for copies on " + device_.name; });
}

CudaSlab::~CudaSlab() {
  cuda::on_device_if_usable(device_, [&] {
    device_.api.release(memory_);
    device_.api.host_release(table_);
  });
}

void CudaSlab::clear_once(cuda::Stream stream) {
  if (cleared_) return;
  check(device_.api, device_.api.clear(memory_, 0, bytes_, stream), [&] { return "clear a slab on " + device_.name; });
  cleared_ = true;
}

CudaStream::CudaStream(cuda::Device& device, Priority priority) : device_(device), api_(device.api) {
  const Current current(device);
  int lowest = 0, highest = 0;  // numerically lower is more urgent
  check_before_copies(device, api_.stream_priorities(&lowest, &highest),
                      [&] { return "ask for priorities of " + device.name; });
  check_before_copies(
      device, api_.stream_create(&handle_, cuda::kStreamNonBlocking, priority == Priority::highest ? highest : 0),
      [&] { return "make a stream on " + device.name; });
}

CudaStream::~CudaStream() {
  cuda::on_device_if_usable(device_, [&] {
    api_.stream_synchronize(handle_);
    api_.stream_destroy(handle_);
  });
}

void CudaStream::after(const Event& event) {
  const Current current(device_);
  check(api_, api_.stream_wait_event(handle_, static_cast<const CudaEvent&>(event).handle(), 0),
        [&] { return "order copies on " + device_.name + " after an event"; });
}

void CudaStream::record(Event& event) {
  static_cast<CudaEvent&>(event).record_on(handle_);
}

void CudaStream::copy(std::span<const FlatCopy> copies) {
  copy_flat(copies, cuda::kToHost);
}

void CudaStream::copy_to_device(std::span<const FlatCopy> copies) {
  copy_flat(copies, cuda::kToDevice);
}

void CudaStream::copy_flat(std::span<const FlatCopy> copies, int kind) {
  const Current current(device_);
  while (!copies.empty()) {
    const auto some = copies.first(std::min(copies.size(), kMostInBatch));
    if (some.size() == 1 || !device_.takes_batches() || !copy_batch(some, kind)) copy_one_by_one(some, kind);
    copies = copies.subspan(some.size());
  }
}

void CudaStream::copy_one_by_one(std::span<const FlatCopy> copies, int kind) {
  const bool to_host = kind == cuda::kToHost;
  for (const FlatCopy& copy : copies) {
    auto* const device = reinterpret_cast<void*>(copy.device);
    check(api_, api_.copy(to_host ? copy.host : device, to_host ? device : copy.host, copy.bytes, kind, handle_), [&] {
      return "copy " + std::to_string(copy.bytes) + " bytes from " +
             (to_host ? device_.name + " to the host" : "the host to " + device_.name);
    });
  }
}

// Returns false if the driver is too old for batches, or refuses this one. Then single copies show which copy is wrong.
bool CudaStream::copy_batch(std::span<const FlatCopy> copies, int kind) {
  std::vector<void*> from(copies.size()), to(copies.size());
  std::vector<size_t> bytes(copies.size());
  for (size_t i = 0; i < copies.size(); ++i) {
    from[i] = reinterpret_cast<void*>(copies[i].device);
    to[i] = copies[i].host;
    if (kind == cuda::kToDevice) std::swap(from[i], to[i]);
    bytes[i] = copies[i].bytes;
  }
  const cuda::Location on_device{cuda::kLocationDevice, device_.index}, on_host{cuda::kLocationHost, 0};
  cuda::CopyAttributes attributes{cuda::kAccessInStreamOrder, on_device, on_host, cuda::kPreferOverlapWithCompute};
  if (kind == cuda::kToDevice) std::swap(attributes.source, attributes.destination);
  size_t start = 0, failed = 0;
  const int code =
      api_.copy_batch_13 != nullptr
          ? api_.copy_batch_13(to.data(), from.data(), bytes.data(), bytes.size(), &attributes, &start, 1, handle_)
          : api_.copy_batch_12(to.data(), from.data(), bytes.data(), bytes.size(), &attributes, &start, 1, &failed,
                               handle_);
  if (code == kSuccess) return true;
  const std::string reason = cuda::error_text(api_, code);
  if (code == cuda::kNeedsNewerDriver || code == cuda::kNotSupported) {
    device_.batches = false;
    note(device_.name + " takes no batches of copies, so that each tensor is a copy of its own (" + reason + ")");
  } else {
    note(device_.name + " refused a batch of copies, which were made one by one (" + reason + ")");
  }
  return false;
}

void CudaStream::copy(const PitchedCopy& copy) {
  const Current current(device_);
  check(api_,
        api_.copy_2d(copy.host, copy.host_pitch, reinterpret_cast<const void*>(copy.device), copy.device_pitch,
                     copy.width, copy.height, cuda::kToHost, handle_),
        [&] {
          return "copy " + std::to_string(copy.height) + " runs of " + std::to_string(copy.width) + " bytes from " +
                 device_.name + " to the host";
        });
}

void CudaStream::pack(Slab& slab, const PackTable& table) {
  const Current current(device_);
  auto& memory = static_cast<CudaSlab&>(slab);
  memory.clear_once(handle_);
  const size_t row_bytes = table.rows.size() * sizeof(PackRow), dim_bytes = table.dims.size() * sizeof(PackDim);
  std::memcpy(memory.host_table(), table.rows.data(), row_bytes);
  if (dim_bytes != 0) std::memcpy(memory.host_table() + row_bytes, table.dims.data(), dim_bytes);
  check(api_,
        api_.copy(reinterpret_cast<void*>(memory.table()), memory.host_table(), row_bytes + dim_bytes, cuda::kToDevice,
                  handle_),
        [&] { return "copy a table of " + std::to_string(table.rows.size()) + " ranges to " + device_.name; });

  constexpr unsigned kBlock = 256;
  const unsigned pieces = (table.bytes + kPackPieceBytes - 1) / kPackPieceBytes;
  DeviceAddress data = memory.address(), rows = memory.table(), dims = rows + row_bytes;
  auto row_count = static_cast<uint32_t>(table.rows.size());
  uint32_t bytes = table.bytes;
  std::array<void*, 5> arguments = {&data, &rows, &row_count, &dims, &bytes};  // in the order of kernels.cu
  check(api_,
        api_.launch(device_.pack, (pieces * kPackLanes + kBlock - 1) / kBlock, 1, 1, kBlock, 1, 1, 0, handle_,
                    arguments.data(), nullptr),
        [&] { return "launch the pack kernel on " + device_.name; });
}

std::vector<WordSum> CudaStream::sum_words(Slab& slab, const WordTable& table, const WordPowers& powers) {
  const Current current(device_);
  auto& memory = static_cast<CudaSlab&>(slab);
  const size_t row_bytes = table.rows.size() * sizeof(WordRow), sum_bytes = table.rows.size() * sizeof(WordSum);
  std::memcpy(memory.host_table(), &powers, sizeof(powers));
  std::memcpy(memory.host_table() + sizeof(powers), table.rows.data(), row_bytes);
  DeviceAddress sums = memory.address(), powers_at = memory.table(), rows = powers_at + sizeof(powers);
  auto* const sums_there = reinterpret_cast<void*>(sums);
  check(api_,
        api_.copy(reinterpret_cast<void*>(powers_at), memory.host_table(), sizeof(powers) + row_bytes, cuda::kToDevice,
                  handle_),
        [&] { return "copy a table of " + std::to_string(table.rows.size()) + " ranges to " + device_.name; });
  check(api_, api_.clear(sums_there, 0, sum_bytes, handle_), [&] { return "clear sums on " + device_.name; });

  constexpr unsigned kBlock = 256, kWarps = kBlock / kSumLanes;
  auto row_count = static_cast<uint32_t>(table.rows.size());
  uint32_t pieces = table.pieces;
  std::array<void*, 5> arguments = {&sums, &powers_at, &rows, &row_count, &pieces};  // in the order of kernels.cu
  check(api_,
        api_.launch(device_.sum_words, (pieces + kWarps - 1) / kWarps, 1, 1, kBlock, 1, 1, 0, handle_, arguments.data(),
                    nullptr),
        [&] { return "launch the kernel of fingerprints on " + device_.name; });
  check(api_, api_.copy(memory.host_table(), sums_there, sum_bytes, cuda::kToHost, handle_),
        [&] { return "copy sums from " + device_.name + " to the host"; });
  check(api_, api_.stream_synchronize(handle_), [&] { return "wait for sums on " + device_.name; });
  std::vector<WordSum> found(table.rows.size());
  std::memcpy(found.data(), memory.host_table(), sum_bytes);
  return found;
}

void CudaStream::drain() {
  const Current current(device_);
  check(api_, api_.stream_synchronize(handle_), [&] { return "wait for a stream of " + device_.name; });
}

}  // namespace vescale_ckpt::device
