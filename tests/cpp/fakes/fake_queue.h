// Work done by one thread, in order: a stream of the fake CUDA.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

namespace vescale_ckpt::device {

class FakeQueue {
 public:
  FakeQueue() : thread_([this] { run(); }) {}
  ~FakeQueue() {
    change([&] { closed_ = true, held_ = false; });
    thread_.join();
  }
  void push(std::function<void()> work) {
    change([&] { work_.push_back(std::move(work)); });
  }
  void drain() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return work_.empty() && !running_; });
  }
  void hold() {  // nothing more runs until release()
    change([&] { held_ = true; });
  }
  void release() {
    change([&] { held_ = false; });
  }

 private:
  template <typename Change>
  void change(const Change& change) {
    const std::lock_guard lock(mutex_);
    change();
    changed_.notify_all();
  }
  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return (closed_ && work_.empty()) || (!held_ && !work_.empty()); });
      if (work_.empty()) return;
      const std::function<void()> work = std::move(work_.front());
      work_.pop_front();
      running_ = true;
      lock.unlock();
      work();
      lock.lock();
      running_ = false;
      changed_.notify_all();
    }
  }
  std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
  bool running_ = false, held_ = false, closed_ = false;
  std::thread thread_;
};

}  // namespace vescale_ckpt::device
