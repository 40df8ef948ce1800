// io_uring: one ring a worker, several transfers in flight each. Compiled empty where liburing is missing.
#include <string>

#include "error.h"
#include "io/channel.h"

#if defined(VESCALE_CKPT_HAVE_LIBURING)
#include <liburing.h>

#include <cerrno>
#include <cstring>

namespace vescale_ckpt::io {
namespace {

class UringChannel final : public Channel {
 public:
  explicit UringChannel(unsigned depth) : depth_(depth) {
    if (const int result = ::io_uring_queue_init(depth, &ring_, 0); result < 0) {
      throw Error(Error::Kind::io, std::string("io_uring cannot be used here: ") + std::strerror(-result));
    }
  }

  ~UringChannel() override {
    while (in_flight_ != 0) {
      io_uring_cqe* entry = nullptr;
      const int result = ::io_uring_wait_cqe(&ring_, &entry);
      if (result == -EINTR) continue;
      if (result < 0) break;
      ::io_uring_cqe_seen(&ring_, entry);
      --in_flight_;
    }
    ::io_uring_queue_exit(&ring_);
  }

  unsigned depth() const override { return depth_; }

  void submit(Transfer* transfer) override {
    const detail::Request request = detail::next_request(*transfer);
    io_uring_sqe* entry = ::io_uring_get_sqe(&ring_);
    if (entry == nullptr) throw Error(Error::Kind::io, "more transfers in flight than the ring is deep");
    const auto size = static_cast<unsigned>(request.size);
    if (transfer->call == Call::read) {
      ::io_uring_prep_read(entry, request.fd, request.data, size, request.offset);
    } else {
      ::io_uring_prep_write(entry, request.fd, request.data, size, request.offset);
    }
    entry->rw_flags = request.flags;
    ::io_uring_sqe_set_data(entry, transfer);
    int result = 0;
    do {
      result = ::io_uring_submit(&ring_);
    } while (result == -EINTR || result == -EAGAIN);
    if (result < 0) throw Error::system("submit a transfer of", transfer->file->path(), transfer->offset, -result);
    ++in_flight_;
  }

  Transfer* wait() override {
    for (;;) {
      io_uring_cqe* entry = nullptr;
      const int result = ::io_uring_wait_cqe(&ring_, &entry);
      if (result == -EINTR) continue;
      if (result < 0) throw Error(Error::Kind::io, std::string("waiting on io_uring: ") + std::strerror(-result));
      auto* transfer = static_cast<Transfer*>(::io_uring_cqe_get_data(entry));
      const int64_t moved = entry->res;
      ::io_uring_cqe_seen(&ring_, entry);
      --in_flight_;
      if (detail::advance(*transfer, system::completed(transfer->call, moved))) return transfer;
      submit(transfer);
    }
  }

 private:
  const unsigned depth_;
  unsigned in_flight_ = 0;
  io_uring ring_{};
};

}  // namespace

std::unique_ptr<Channel> detail::make_uring_channel(unsigned depth) {
  return std::make_unique<UringChannel>(depth);
}

bool uring_available(std::string* reason) {
  // The sysctl and the kernel version do not tell: containers refuse the call itself.
  io_uring ring{};
  const int result = ::io_uring_queue_init(1, &ring, 0);
  if (result == 0) {
    ::io_uring_queue_exit(&ring);
    return true;
  }
  if (reason != nullptr) *reason = std::strerror(-result);
  return false;
}

}  // namespace vescale_ckpt::io

#else

namespace vescale_ckpt::io {

std::unique_ptr<Channel> detail::make_uring_channel(unsigned) {
  throw Error(Error::Kind::io, "io_uring cannot be used here: built without liburing");
}

bool uring_available(std::string* reason) {
  if (reason != nullptr) *reason = "built without liburing";
  return false;
}

}  // namespace vescale_ckpt::io

#endif
