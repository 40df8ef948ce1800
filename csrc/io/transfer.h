// Moves one range of bytes between memory and a file, with blocking system calls. Concurrency comes from the number of
// threads. Thread-safe on different transfers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "base/system.h"
#include "io/file.h"

namespace vescale_ckpt::io {

struct Transfer {
  Call call = Call::read;  // read or write
  File* file = nullptr;
  uint64_t offset = 0;  // bytes from the start of the file; a multiple of kBlock, as is `data`'s address modulo the
  std::byte* data = nullptr;   // file's memory alignment, wherever file->access() is direct. Null: see `lent`
  uint64_t size = 0;           // bytes asked for
  uint64_t needed = 0;         // bytes that must arrive: a read of whole blocks may pass the end of the file
  bool part_of_block = false;  // others may write to the block: through the page cache, at any offset and size

  // Set by perform().
  std::shared_ptr<const std::byte> lent;  // where a remote read without `data` has its bytes; `data` is there then
  bool reopened = false;                  // the file, after ESTALE
  uint64_t done = 0;
  Access access = Access::buffered;  // how the last part travelled
};

// Returns when the transfer is complete: short calls are continued, interrupted ones repeated, refused direct ones
// repeated the next way. Of a remote file, one request, or a copy into a part that is sent. Throws Error.
void perform(Transfer& transfer);

// Bytes that perform() has read into memory in this process so far.
uint64_t bytes_read();

// Read or write a few bytes at once, through the page cache. Throw Error.
void read_exactly(File& file, uint64_t offset, std::span<std::byte> target);
void write_exactly(File& file, uint64_t offset, std::span<const std::byte> source);

}  // namespace vescale_ckpt::io
