#include "io/channel.h"

#include <algorithm>
#include <cerrno>

#include "error.h"
#include "io/memory.h"

namespace vescale_ckpt::io {
namespace detail {

Request next_request(Transfer& transfer) {
  // One call moves at most 2,147,479,552 bytes whatever is asked.
  constexpr uint64_t kMost = 1 << 30;
  transfer.access = transfer.part_of_block ? Access::buffered : transfer.file->access();
  // A short direct transfer may end off a block (at the end of the file): what is left goes through the page cache.
  if (transfer.access == Access::direct && transfer.done % kBlock != 0) transfer.access = Access::buffered;
  return {transfer.file->descriptor(transfer.access), File::transfer_flags(transfer.access),
          transfer.data + transfer.done, std::min(kMost, transfer.size - transfer.done),
          transfer.offset + transfer.done};
}

bool advance(Transfer& transfer, int64_t result) {
  if (result > 0) {
    transfer.done += static_cast<uint64_t>(result);
    // Of a read across the end of the file no more comes, and asking for it would go through the page cache.
    return transfer.done >= (transfer.call == Call::read ? transfer.needed : transfer.size);
  }
  const uint64_t at = transfer.offset + transfer.done;
  if (result == 0) {
    if (transfer.call == Call::read && transfer.done >= transfer.needed) return true;
    if (transfer.call == Call::read) {
      throw Error::corrupt("file " + transfer.file->path() + " ends at offset " + std::to_string(at) + ", " +
                               std::to_string(transfer.needed - transfer.done) + " bytes too early",
                           transfer.file->path(), at);
    }
    throw Error::system("write", transfer.file->path(), at, EIO);  // no progress and no reason
  }
  const int error = static_cast<int>(-result);
  if (error == EINTR || error == EAGAIN) return false;
  if (File::is_refusal(error) && transfer.file->fall_back(transfer.access)) return false;
  throw Error::system(transfer.call == Call::read ? "read" : "write", transfer.file->path(), at, error);
}

}  // namespace detail

Backend backend_named(const std::string& name) {
  if (name == "auto") return Backend::automatic;
  if (name == "threads") return Backend::threads;
  if (name == "uring") return Backend::uring;
  throw Error::invalid("unknown I/O backend \"" + name + "\": auto, threads or uring");
}

std::unique_ptr<Channel> make_channel(Backend backend, unsigned depth) {
  return backend == Backend::uring ? detail::make_uring_channel(depth) : detail::make_blocking_channel();
}

void read_exactly(File& file, uint64_t offset, std::span<std::byte> target) {
  Transfer transfer;
  transfer.file = &file;
  transfer.offset = offset;
  transfer.data = target.data();
  transfer.size = transfer.needed = target.size();
  for (bool complete = target.empty(); !complete;) {
    const int64_t result = system::read(file.descriptor(Access::buffered), target.data() + transfer.done,
                                        target.size() - transfer.done, offset + transfer.done, 0);
    complete = detail::advance(transfer, result);
  }
}

void write_exactly(File& file, uint64_t offset, std::span<const std::byte> source) {
  Transfer transfer;
  transfer.call = Call::write;
  transfer.file = &file;
  transfer.offset = offset;
  transfer.size = transfer.needed = source.size();
  for (bool complete = source.empty(); !complete;) {
    const int64_t result = system::write(file.descriptor(Access::buffered), source.data() + transfer.done,
                                         source.size() - transfer.done, offset + transfer.done, 0);
    complete = detail::advance(transfer, result);
  }
}

}  // namespace vescale_ckpt::io
