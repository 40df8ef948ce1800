// Loads whole tensors of a safetensors file into new memory, on threads of its own, while the caller makes objects of
// them.
//
// Tensors lie in memory as they lie in the file, so that one transfer reads many of them without a copy. A tensor of
// kOwnMemory bytes or more has memory of its own. Smaller ones share memory with their neighbours in the file, at most
// kSharedMemory bytes, which is given back with the last of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <future>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "hf/safetensors_file.h"
#include "read/reader.h"

namespace vescale_ckpt::hf {

class SafetensorsLoad {
 public:
  static constexpr uint64_t kOwnMemory = 8 << 20;
  static constexpr uint64_t kSharedMemory = 16 << 20;
  static constexpr uint64_t kAlignment = 64;  // of each tensor's memory, bytes

  struct Tensor {
    std::shared_ptr<std::byte> data;  // undefined until finish() returns; null where there are no bytes
    std::string_view dtype;           // torch's name
    std::vector<int64_t> shape;       // as torch counts
  };

  // Takes memory for these tensors, in this order, and begins to read them. Throws Error (invalid, with the position in
  // `numbers` as item) for a tensor that torch cannot hold, and std::bad_alloc.
  SafetensorsLoad(std::shared_ptr<const SafetensorsFile> file, std::span<const size_t> numbers, bool verify,
                  const io::EngineOptions& options);

  std::span<const Tensor> tensors() const { return tensors_; }

  // Waits until all is read, once. Throws Error (corrupt, with the position as item; io). Bytes without checksums are
  // counted as unverified.
  std::unique_ptr<read::ReadReport> finish() { return report_.get(); }

 private:
  void take_memory(std::span<const size_t> numbers);
  std::vector<read::ReadItem> items(std::span<const size_t> numbers, std::vector<int64_t>& rows) const;

  std::shared_ptr<const SafetensorsFile> file_;
  std::vector<Tensor> tensors_;
  std::future<std::unique_ptr<read::ReadReport>> report_;  // the last: it waits before all else goes
};

}  // namespace vescale_ckpt::hf
