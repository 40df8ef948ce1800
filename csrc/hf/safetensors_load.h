// Loads whole tensors of a safetensors file into new memory, on threads of its own, while the caller makes objects of
// them.
//
// A tensor of kOwnMemory bytes or more has a block of memory of its own. Smaller ones share a block with their
// neighbours in the file, at most kSharedMemory bytes, which is given back with the last of them. In host memory large
// tensors begin on the byte of a page that they have in the file, so that they are read without a copy. On an
// accelerator a block is the caller's. One block for a whole file would be fewer allocations there, but it stays while
// any tensor of it is in use: a model that is converted tensor by tensor would take twice its memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "base/new_memory.h"
#include "hf/safetensors_file.h"
#include "read/reader.h"

namespace vescale_ckpt::hf {

class SafetensorsLoad {
 public:
  static constexpr uint64_t kOwnMemory = 8 << 20;
  static constexpr uint64_t kSharedMemory = 16 << 20;
  static constexpr uint64_t kAlignment = 64;         // bytes, for each tensor in host memory
  static constexpr uint64_t kDeviceAlignment = 512;  // for each tensor in a block of an accelerator, as torch's own

  struct Tensor {
    std::shared_ptr<std::byte> data;  // undefined until finish() returns; null where there are no bytes
    std::string_view dtype;           // torch's name
    std::vector<int64_t> shape;       // as torch counts
    uint64_t bytes = 0;
    size_t block = 0;     // in the order in which they were taken
    uint64_t offset = 0;  // in the block, bytes
    bool alone = false;   // no other tensor is in the block
  };

  // Memory of an accelerator in place of the host's.
  struct OnDevice {
    int device;
    // Gives a block for a tensor that is alone in it, or for `bytes` bytes of several (nullptr). It stays until the
    // load is gone.
    std::function<std::byte*(const Tensor* alone, uint64_t bytes)> take;
    // Gives what copies to the accelerator, once all blocks are taken: the copies come after all work that was queued
    // there by then. It stays until the load is gone, and is to be finished after it.
    std::function<read::DeviceSink*()> sink;
  };

  // Takes memory for these tensors, in this order, and begins to read them. Throws Error (invalid, with the position in
  // `numbers` as item) for a tensor that torch cannot hold, std::bad_alloc, and what `target` throws, whose functions
  // are called before this returns. nullptr: host memory.
  SafetensorsLoad(std::shared_ptr<const SafetensorsFile> file, std::span<const size_t> numbers, bool verify,
                  const io::EngineOptions& options, const OnDevice* target = nullptr);

  std::span<const Tensor> tensors() const { return tensors_; }

  // Waits until all is read, once. Throws Error (corrupt, with the position as item; io). Bytes without checksums are
  // counted as unverified.
  std::unique_ptr<read::ReadReport> finish() { return report_.get(); }

 private:
  void take_memory(std::span<const size_t> numbers, const OnDevice* target);
  std::vector<read::ReadItem> items(std::span<const size_t> numbers, std::vector<int64_t>& rows, int device) const;

  std::shared_ptr<const SafetensorsFile> file_;
  std::vector<Tensor> tensors_;
  std::optional<NewMemory> new_memory_;                    // of all tensors, in host memory
  std::future<std::unique_ptr<read::ReadReport>> report_;  // the last: it waits before all else goes
};

}  // namespace vescale_ckpt::hf
