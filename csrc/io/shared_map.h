// Maps a file into memory that is shared with other processes: ranks of a node see there what one of them has read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace vescale_ckpt::io {

class SharedMap {
 public:
  // The descriptor may be closed afterwards. Throws Error (io). Pages are taken when they are first touched: taking all
  // of them here would cost more, because nothing is read meanwhile.
  SharedMap(int descriptor, uint64_t bytes);
  ~SharedMap();
  SharedMap(const SharedMap&) = delete;
  SharedMap& operator=(const SharedMap&) = delete;

  std::span<std::byte> bytes() const { return bytes_; }

 private:
  std::span<std::byte> bytes_;
};

}  // namespace vescale_ckpt::io
