// Blocking calls: concurrency comes from the number of workers, each with one transfer in flight.
#include <utility>

#include "io/channel.h"

namespace vescale_ckpt::io::detail {
namespace {

class BlockingChannel final : public Channel {
 public:
  unsigned depth() const override { return 1; }

  void submit(Transfer* transfer) override { pending_ = transfer; }

  Transfer* wait() override {
    Transfer* transfer = std::exchange(pending_, nullptr);
    for (bool complete = false; !complete;) {
      const Request request = next_request(*transfer);
      complete = advance(*transfer,
                         transfer->call == Call::read
                             ? system::read(request.fd, request.data, request.size, request.offset, request.flags)
                             : system::write(request.fd, request.data, request.size, request.offset, request.flags));
    }
    return transfer;
  }

 private:
  Transfer* pending_ = nullptr;
};

}  // namespace

std::unique_ptr<Channel> make_blocking_channel() {
  return std::make_unique<BlockingChannel>();
}

}  // namespace vescale_ckpt::io::detail
