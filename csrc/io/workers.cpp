#include "io/workers.h"

#include <exception>
#include <thread>
#include <vector>

namespace vescale_ckpt {

void run_workers(unsigned count, const std::function<void(const std::atomic<bool>&)>& body) {
  std::atomic<bool> stop{false};
  std::mutex mutex;
  std::exception_ptr first;
  const auto guarded = [&] {
    try {
      body(stop);
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!first) first = std::current_exception();
      stop.store(true);
    }
  };
  {
    std::vector<std::jthread> threads;
    for (unsigned worker = 1; worker < count; ++worker) threads.emplace_back(guarded);
    guarded();
  }
  if (first) std::rethrow_exception(first);
}

}  // namespace vescale_ckpt
