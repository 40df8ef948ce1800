#include "base/trace.h"

#include <chrono>
#include <mutex>
#include <utility>

namespace vescale_ckpt::trace {
namespace {

std::atomic<bool> is_enabled{false};

struct Store {
  std::mutex mutex;  // guards all below
  Taken kept;
  std::vector<bool> lanes;  // which are taken
};

// Never destroyed: threads may end after the process's destructors have run.
Store& store() {
  static Store& instance = *new Store;
  return instance;
}

// The lane of a thread, from its first span to its end.
class Lane {
 public:
  Lane() {
    const std::lock_guard lock(store().mutex);
    std::vector<bool>& lanes = store().lanes;
    while (number_ < lanes.size() && lanes[number_]) ++number_;
    if (number_ == lanes.size()) lanes.push_back(false);
    lanes[number_] = true;
  }
  ~Lane() {
    const std::lock_guard lock(store().mutex);
    store().lanes[number_] = false;
  }
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;
  uint32_t number() const { return number_; }

 private:
  uint32_t number_ = 0;
};

}  // namespace

const char* name_of(Step step) {
  constexpr const char* kNames[] = {"checksum", "write", "limit", "sync", "read", "verify", "copy"};
  return kNames[static_cast<size_t>(step)];
}

void enable(bool on) {
  is_enabled.store(on, std::memory_order_relaxed);
}
bool enabled() {
  return is_enabled.load(std::memory_order_relaxed);
}

Taken take() {
  const std::lock_guard lock(store().mutex);
  return std::exchange(store().kept, {});
}

int64_t Laps::now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void Laps::record(Step step, uint64_t bytes) {
  thread_local const Lane lane;
  const int64_t end = now();
  {
    const std::lock_guard lock(store().mutex);
    Taken& kept = store().kept;
    if (kept.spans.size() < kMostSpans) {
      kept.spans.push_back({step, lane.number(), begin_, end, bytes});
    } else {
      ++kept.dropped;
    }
  }
  begin_ = end;
}

}  // namespace vescale_ckpt::trace
