#include "io/transfer.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <string>
#include <thread>
#include <utility>

#include "base/error.h"

namespace vescale_ckpt::io {
namespace {

std::atomic<uint64_t> all_read{0};

// Asks the system for what is left of a transfer: bytes moved, or -errno.
int64_t move_some(Transfer& transfer) {
  // One call moves at most 2,147,479,552 bytes whatever is asked.
  constexpr uint64_t kMost = 1 << 30;
  transfer.access = transfer.part_of_block ? Access::buffered : transfer.file->access();
  // A short direct transfer may end off a block (at the end of the file): what is left goes through the page cache.
  if (transfer.access == Access::direct && transfer.done % kBlock != 0) transfer.access = Access::buffered;
  const int fd = transfer.file->descriptor(transfer.access);
  std::byte* const data = transfer.data + transfer.done;
  const uint64_t size = std::min(kMost, transfer.size - transfer.done);
  const uint64_t offset = transfer.offset + transfer.done;
  return transfer.call == Call::read ? system::read(fd, data, size, offset) : system::write(fd, data, size, offset);
}

std::string too_short(const Transfer& transfer) {
  return "file " + transfer.file->path() + " ends at offset " + std::to_string(transfer.offset + transfer.done) + ", " +
         std::to_string(transfer.needed - transfer.done) + " bytes too early";
}

// Takes note of one call's result: true when the transfer is complete, false if the rest must be asked for again.
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
      throw Error::corrupt(too_short(transfer), transfer.file->path(), at);
    }
    throw Error::system("write", transfer.file->path(), at, EIO);  // no progress and no reason
  }
  const int error = static_cast<int>(-result);
  if (error == EINTR || error == EAGAIN) return false;
  if (File::is_refusal(error) && transfer.file->fall_back(transfer.access)) return false;
  if (error == ESTALE && transfer.call == Call::read && !transfer.reopened) {
    transfer.reopened = true;  // once: a server that has been started anew, perhaps
    if (transfer.file->reopen()) return false;
  }
  throw Error::system(transfer.call == Call::read ? "read" : "write", transfer.file->path(), at, error);
}

void perform_remotely(Transfer& transfer) {
  File& file = *transfer.file;
  transfer.access = Access::buffered;
  if (transfer.call == Call::write) {
    file.window()->write(transfer.offset, {transfer.data, transfer.size});
    transfer.done = transfer.size;
    return;
  }
  const uint64_t left = file.size() - std::min(file.size(), transfer.offset);
  const uint64_t size = std::min(transfer.size, left);
  if (size < transfer.needed) {
    transfer.done = size;
    throw Error::corrupt(too_short(transfer), file.path(), transfer.offset + size);
  }
  if (size != 0) {
    auto fetched = file.remote()->fetch(transfer.offset, size);
    if (transfer.data == nullptr) {
      transfer.lent = std::move(fetched);
      transfer.data = const_cast<std::byte*>(transfer.lent.get());  // only writes change what `data` points at
    } else {
      std::memcpy(transfer.data, fetched.get(), size);
    }
  }
  transfer.done = size;
  all_read.fetch_add(size, std::memory_order_relaxed);
}

void transfer_exactly(Call call, File& file, uint64_t offset, std::byte* data, uint64_t size) {
  if (size == 0) return;
  Transfer transfer;
  transfer.call = call;
  transfer.file = &file;
  transfer.offset = offset;
  transfer.data = data;
  transfer.size = transfer.needed = size;
  transfer.part_of_block = true;
  perform(transfer);
}

}  // namespace

void perform(Transfer& transfer) {
  const File& file = *transfer.file;
  if (file.remote() != nullptr || file.window() != nullptr) {
    perform_remotely(transfer);
    return;
  }
  while (!advance(transfer, move_some(transfer))) {
  }
  if (transfer.call == Call::read) all_read.fetch_add(transfer.done, std::memory_order_relaxed);
}

uint64_t bytes_read() {
  return all_read.load(std::memory_order_relaxed);
}

void read_exactly(File& file, uint64_t offset, std::span<std::byte> target) {
  transfer_exactly(Call::read, file, offset, target.data(), target.size());
}

void write_exactly(File& file, uint64_t offset, std::span<const std::byte> source) {
  transfer_exactly(Call::write, file, offset, const_cast<std::byte*>(source.data()), source.size());
}

RateLimit::RateLimit(uint64_t bytes_per_second, Clock clock)
    : bytes_per_second_(static_cast<double>(bytes_per_second)), clock_(std::move(clock)) {}

RateLimit::Time RateLimit::take(uint64_t bytes) {
  if (bytes_per_second_ == 0) return Time::zero();
  // A year, past which a clock of nanoseconds would overflow before long.
  constexpr double kMostSeconds = 365.0 * 24 * 3600;
  const std::chrono::duration<double> cost(std::min(kMostSeconds, static_cast<double>(bytes) / bytes_per_second_));
  const std::lock_guard lock(mutex_);
  const Time now = clock_();
  paid_ = std::max(paid_, now - kBurst);
  const Time wait = std::max(Time::zero(), paid_ - now);
  paid_ += std::chrono::duration_cast<Time>(cost);
  return wait;
}

RateLimit::Time RateLimit::steady_now() {
  return std::chrono::steady_clock::now().time_since_epoch();
}

TransferControl::TransferControl(std::string path, uint64_t bytes_per_second)
    : path_(std::move(path)), limit_(bytes_per_second) {}

void TransferControl::check() const {
  if (cancelled_.load(std::memory_order_relaxed)) {
    throw Error(Error::Kind::cancelled, "writing " + path_ + " was cancelled", path_);
  }
}

void TransferControl::admit(uint64_t bytes, const std::atomic<bool>& stop) {
  constexpr std::chrono::milliseconds kLookUp{20};  // how soon one that waits notices that it is to end
  check();
  for (RateLimit::Time left = limit_.take(bytes); left > RateLimit::Time::zero() && !stop; left -= kLookUp) {
    std::this_thread::sleep_for(std::min<RateLimit::Time>(left, kLookUp));
    check();
  }
}

}  // namespace vescale_ckpt::io
