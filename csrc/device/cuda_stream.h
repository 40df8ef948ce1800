// Implements CUDA's streams, events and slabs.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "device/cuda_device.h"
#include "device/device.h"

namespace vescale_ckpt::device {

class CudaEvent final : public Event {
 public:
  explicit CudaEvent(const cuda::Device& device);
  ~CudaEvent() override;
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  void record(StreamHandle producer) override;
  void record_on(cuda::Stream own);  // on a stream of the engine
  void wait() override;
  cuda::EventHandle handle() const { return handle_; }

 private:
  const cuda::Device& device_;
  cuda::EventHandle handle_ = nullptr;
};

class CudaSlab final : public Slab {
 public:
  static constexpr uint64_t kTableBytes = kPackRows * sizeof(PackRow) + kPackDims * sizeof(PackDim);
  static_assert(sizeof(WordPowers) + kWordRows * sizeof(WordRow) <= kTableBytes);
  static_assert(kWordRows * sizeof(WordSum) <= kTableBytes);

  // Takes over device memory of `bytes` + kTableBytes, and page-locked host memory of kTableBytes.
  CudaSlab(const cuda::Device& device, void* memory, void* table, uint64_t bytes)
      : device_(device), memory_(memory), table_(static_cast<std::byte*>(table)), bytes_(bytes) {}
  ~CudaSlab() override;
  CudaSlab(const CudaSlab&) = delete;
  CudaSlab& operator=(const CudaSlab&) = delete;

  DeviceAddress address() const override { return reinterpret_cast<DeviceAddress>(memory_); }
  // Clears the slab before its first use: the gaps between packed rows are copied to the host, too.
  void clear_once(cuda::Stream stream);
  DeviceAddress table() const override { return address() + bytes_; }
  std::byte* host_table() const { return table_; }

 private:
  const cuda::Device& device_;
  void* const memory_;
  std::byte* const table_;
  const uint64_t bytes_;
  bool cleared_ = false;
};

class CudaStream final : public CopyStream {
 public:
  static constexpr size_t kMostInBatch =
      512;  // there are reports of drivers that crash with tens of thousands in a call

  CudaStream(cuda::Device& device, Priority priority);
  ~CudaStream() override;
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;

  void after(const Event& event) override;
  void record(Event& event) override;
  void copy(std::span<const FlatCopy> copies) override;
  void copy(const PitchedCopy& copy) override;
  void copy_to_device(std::span<const FlatCopy> copies) override;
  void pack(Slab& slab, const PackTable& table) override;
  std::vector<WordSum> sum_words(Slab& slab, const WordTable& table, const WordPowers& powers) override;
  void drain() override;

 private:
  void copy_flat(std::span<const FlatCopy> copies, int kind);
  void copy_one_by_one(std::span<const FlatCopy> copies, int kind);
  bool copy_batch(std::span<const FlatCopy> copies, int kind);

  cuda::Device& device_;
  const cuda::Api& api_;
  cuda::Stream handle_ = nullptr;
};

}  // namespace vescale_ckpt::device
