// Runs work on several threads until all return; the first error stops the others and is thrown to the caller.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>

namespace vescale_ckpt {

// Calls `body(stop)` on `count` threads, the calling one included. `stop` turns true when another thread threw: return
// soon. Throws what the first failing thread threw.
//
// With `niceness` (1 to 19) all threads are new ones, with a priority lower by so much; the calling one only waits.
void run_workers(unsigned count, const std::function<void(const std::atomic<bool>& stop)>& body, int niceness = 0);

// Calls make_body() once a thread (for what that thread reuses), and what it returns as body(i) for each i < count, in
// batches of `step`, in no order. Throws what the first failing call threw.
template <typename MakeBody>
void parallel_for(unsigned threads, size_t count, size_t step, const MakeBody& make_body, int niceness = 0) {
  if (count == 0) return;
  std::atomic<size_t> next{0};
  const size_t batches = (count + step - 1) / step;
  const auto work = [&](const std::atomic<bool>& stop) {
    auto body = make_body();
    while (!stop) {
      const size_t begin = next.fetch_add(step);
      if (begin >= count) return;
      for (size_t i = begin; i < std::min(count, begin + step); ++i) body(i);
    }
  };
  run_workers(static_cast<unsigned>(std::min<size_t>(threads, batches)), work, niceness);
}

// Work handed to several threads: a queue that knows how much is still to come, so that a worker with nothing to take
// can tell "wait" from "done". T is cheap to move. Thread-safe.
template <typename T>
class WorkQueue {
 public:
  void expect(uint64_t items) { left_ += items; }  // before the workers start

  void push(T item) {
    {
      const std::lock_guard lock(mutex_);
      ready_.push_back(std::move(item));
    }
    changed_.notify_one();
  }

  // Where the rest is in order, too: lower items come first.
  void push_in_order(T item) {
    {
      const std::lock_guard lock(mutex_);
      ready_.insert(std::upper_bound(ready_.begin(), ready_.end(), item), item);
    }
    changed_.notify_one();
  }

  // Waits for an item; false when all expected items were taken or the queue was closed.
  bool take(T& item) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return closed_ || left_ == 0 || !ready_.empty(); });
    if (closed_ || ready_.empty()) return false;
    item = std::move(ready_.front());
    ready_.pop_front();
    if (--left_ == 0) changed_.notify_all();
    return true;
  }

  bool closed() {
    const std::lock_guard lock(mutex_);
    return closed_;
  }

  void close() {
    {
      const std::lock_guard lock(mutex_);
      closed_ = true;
    }
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  std::deque<T> ready_;
  uint64_t left_ = 0;
  bool closed_ = false;
};

}  // namespace vescale_ckpt
