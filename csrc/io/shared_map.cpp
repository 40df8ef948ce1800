#include "io/shared_map.h"

#include <atomic>
#include <cerrno>
#include <chrono>

#include "base/error.h"
#include "base/system.h"

namespace vescale_ckpt::io {

SharedMap::SharedMap(int descriptor, uint64_t bytes) {
  const int64_t address = system::map_shared(descriptor, bytes);
  if (address < 0) throw Error::system("map shared memory", "", 0, static_cast<int>(-address));
  bytes_ = {reinterpret_cast<std::byte*>(static_cast<uintptr_t>(address)), bytes};
}

SharedMap::~SharedMap() {
  system::release_addresses(bytes_.data(), bytes_.size());
}

void SharedCounter::set(uint32_t value) {
  std::atomic_ref(*word_).store(value, std::memory_order_release);
  system::wake_waiters(word_);
}

uint32_t SharedCounter::value() const {
  return std::atomic_ref(*word_).load(std::memory_order_acquire);
}

uint32_t SharedCounter::wait(uint32_t least, double seconds) const {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  for (;;) {
    const uint32_t now = value();
    const double left = std::chrono::duration<double>(end - Clock::now()).count();
    if (now >= least || left <= 0) return now;
    if (system::wait_for_change(word_, now, left) == -EINTR) return value();
  }
}

}  // namespace vescale_ckpt::io
