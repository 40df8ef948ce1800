// A file in memory, shared with whoever maps it too: how ranks of a node look at what one of them has read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace vescale_ckpt::io {

class SharedMap {
 public:
  // The descriptor may be closed afterwards. Throws Error (io). Pages come when they are touched: taken all at once
  // they cost more, as then nothing is read meanwhile.
  SharedMap(int descriptor, uint64_t bytes);
  ~SharedMap();
  SharedMap(const SharedMap&) = delete;
  SharedMap& operator=(const SharedMap&) = delete;

  std::span<std::byte> bytes() const { return bytes_; }

 private:
  std::span<std::byte> bytes_;
};

}  // namespace vescale_ckpt::io
