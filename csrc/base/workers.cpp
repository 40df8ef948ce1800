#include "base/workers.h"

#include <exception>
#include <thread>
#include <vector>

#include "base/system.h"

namespace vescale_ckpt {

void run_workers(unsigned count, const std::function<void(const std::atomic<bool>&)>& body, int niceness) {
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
    if (niceness > 0) {
      const auto in_background = [&] {
        system::lower_priority(niceness);  // where it is refused, the work is done all the same
        guarded();
      };
      for (unsigned worker = 0; worker == 0 || worker < count; ++worker) threads.emplace_back(in_background);
    } else {
      for (unsigned worker = 1; worker < count; ++worker) threads.emplace_back(guarded);
      guarded();
    }
  }
  if (first) std::rethrow_exception(first);
}

}  // namespace vescale_ckpt
