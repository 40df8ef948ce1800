// Where tensors lie in a new safetensors file, and its header.
//
// Tensors come in the order in which the safetensors library writes them: by dtype, the widest first, then by name. The
// header is padded with spaces so that the data begin where direct I/O suits torch's memory (safetensors.h).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "hf/safetensors.h"

namespace vescale_ckpt::hf {

class SafetensorsLayout {
 public:
  struct Tensor {
    std::string name;             // UTF-8
    uint32_t dtype;               // index into safetensors_dtypes()
    std::vector<uint64_t> shape;  // as torch counts: see SafetensorsHeader::torch_shape
  };

  // Throws Error (invalid, tensor) for names that are equal or no tensor's, sizes that overflow, shapes that end inside
  // a byte; and Error (invalid) for names that are no text, and for a header that no reader would take. `metadata` has
  // unique keys, and not that of the checksums.
  SafetensorsLayout(std::vector<Tensor> tensors, SafetensorsHeader::Metadata metadata);

  std::span<const size_t> order() const { return order_; }    // tensors as they lie in the file
  std::span<const uint64_t> bytes() const { return bytes_; }  // one number a tensor, in that order
  uint64_t data_begin() const { return data_begin_; }
  uint64_t file_bytes() const { return file_bytes_; }

  // Length and header: data_begin() bytes. `blocks`: checksums of what was written at data_begin(), a block for each
  // cell of the file that a tensor touches.
  std::string head(std::vector<uint32_t> blocks) const;

 private:
  uint64_t count_blocks(uint64_t data_begin) const;

  std::vector<size_t> order_;
  std::vector<uint64_t> bytes_;
  std::string before_, behind_;  // the header on both sides of the checksums' text
  uint64_t data_begin_ = 0, file_bytes_ = 0;
};

}  // namespace vescale_ckpt::hf
