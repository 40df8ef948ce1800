// A channel carries transfers between memory and files for one worker thread: the seam between what is moved and how
// (blocking calls, io_uring). One channel belongs to one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "io/file.h"
#include "io/system.h"

namespace vescale_ckpt::io {

struct Transfer {
  Call call = Call::read;  // read or write
  File* file = nullptr;
  uint64_t offset = 0;  // bytes from the start of the file; a multiple of kBlock, as is `data`'s address modulo the
  std::byte* data = nullptr;   // file's memory alignment, wherever file->access() is direct
  uint64_t size = 0;           // bytes asked for
  uint64_t needed = 0;         // bytes that must arrive: a read of whole blocks may pass the end of the file
  bool part_of_block = false;  // of one that others may write to: through the page cache, of any offset and size
  void* context = nullptr;

  // Set by the channel.
  uint64_t done = 0;
  Access access = Access::buffered;  // how the last part travelled
};

enum class Backend { automatic, threads, uring };

class Channel {
 public:
  virtual ~Channel() = default;        // waits for what is in flight: the kernel may still be writing to its memory
  virtual unsigned depth() const = 0;  // how many transfers are worth having in flight
  virtual void submit(Transfer* transfer) = 0;  // `transfer` must live until wait() returned it
  // The next finished transfer, complete (short transfers are continued, interrupted ones repeated, refused direct
  // ones repeated the next way). Throws Error if one failed; there must be one in flight.
  virtual Transfer* wait() = 0;
};

// `backend` as asked for; automatic means threads, which no measurement has beaten at our piece sizes.
// Throws Error(invalid) if io_uring is asked for and not to be had, saying why.
std::unique_ptr<Channel> make_channel(Backend backend, unsigned depth);
Backend backend_named(const std::string& name);
// Whether io_uring can be used here, found by making a ring; `reason` says why not.
bool uring_available(std::string* reason = nullptr);

// Read or write a few bytes at once, through the page cache, on the calling thread. Throw Error.
void read_exactly(File& file, uint64_t offset, std::span<std::byte> target);
void write_exactly(File& file, uint64_t offset, std::span<const std::byte> source);

namespace detail {
std::unique_ptr<Channel> make_blocking_channel();
std::unique_ptr<Channel> make_uring_channel(unsigned depth);

// What both backends do with one result: returns true when the transfer is complete, false if the rest must be asked
// for again. Throws Error otherwise.
bool advance(Transfer& transfer, int64_t result);
// The request that is left, in the terms of a system call.
struct Request {
  int fd;
  int flags;
  std::byte* data;
  uint64_t size;
  uint64_t offset;
};
Request next_request(Transfer& transfer);
}  // namespace detail

}  // namespace vescale_ckpt::io
