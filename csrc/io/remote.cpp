#include "io/remote.h"

#include <algorithm>
#include <cctype>
#include <chrono>
#include <cstring>
#include <utility>

#include "base/error.h"

namespace vescale_ckpt::io {
namespace {

constexpr auto kPoll = std::chrono::milliseconds(50);

constexpr uint64_t kLeastPart = 5 << 20;
constexpr uint64_t kMostParts = 8'000;  // 10,000 are allowed, but the size is an estimate

RemoteStore& registered() {
  static RemoteStore& store = *new RemoteStore;  // never destroyed: it may hold what must not outlive its runtime
  return store;
}

}  // namespace

PartWindow::Part::~Part() {
  const std::lock_guard lock(window_->mutex_);
  if (window_->free_.size() < window_->ahead_) window_->free_.push_back(std::move(memory_));
}

void PartWindow::check() const {
  if (cancelled_) throw Error(Error::Kind::cancelled, "writing " + path_ + " was cancelled", path_);
  if (error_) throw *error_;
}

void PartWindow::wait_for_room(uint64_t end, const std::function<bool()>& closed) {
  if (end == 0) return;
  std::unique_lock lock(mutex_);
  if (end > goes_on_until_) {
    goes_on_until_ = end;
    changed_.notify_all();
  }
  for (;;) {
    check();
    if ((end - 1) / part_bytes_ < taken_ + ahead_) return;
    if (closed && closed()) throw Error(Error::Kind::cancelled, "writing " + path_ + " was given up", path_);
    changed_.wait_for(lock, kPoll);
  }
}

PartWindow::Filling& PartWindow::filling(uint64_t part) {
  if (part < taken_) {
    throw Error(Error::Kind::invalid, path_ + " is written in order, and once: what lies there was sent already", path_,
                part * part_bytes_);
  }
  Filling& found = parts_[part];
  if (!found.memory) {
    if (free_.empty()) {
      found.memory = std::make_unique_for_overwrite<std::byte[]>(part_bytes_);
    } else {
      found.memory = std::move(free_.back());
      free_.pop_back();
    }
  }
  return found;
}

std::byte* PartWindow::place(uint64_t offset, uint64_t bytes) {
  const uint64_t part = offset / part_bytes_;
  if (bytes == 0 || (offset + bytes - 1) / part_bytes_ != part) return nullptr;
  const std::lock_guard lock(mutex_);
  check();
  return filling(part).memory.get() + offset % part_bytes_;
}

void PartWindow::write(uint64_t offset, std::span<const std::byte> bytes) {
  wait_for_room(offset + bytes.size(), {});
  while (!bytes.empty()) {
    const uint64_t part = offset / part_bytes_, at = offset % part_bytes_;
    const auto piece = bytes.first(std::min<uint64_t>(bytes.size(), part_bytes_ - at));
    std::byte* memory = nullptr;
    {
      const std::lock_guard lock(mutex_);
      check();
      memory = filling(part).memory.get() + at;
    }
    if (memory != piece.data()) std::memcpy(memory, piece.data(), piece.size());
    {
      const std::lock_guard lock(mutex_);
      filling(part).written += piece.size();
    }
    changed_.notify_all();
    offset += piece.size();
    bytes = bytes.subspan(piece.size());
  }
}

void PartWindow::finish(uint64_t length) {
  {
    const std::lock_guard lock(mutex_);
    check();
    length_ = length;
  }
  changed_.notify_all();
  wait_for_end();
  const std::lock_guard lock(mutex_);
  check();
}

void PartWindow::cancel() {
  {
    const std::lock_guard lock(mutex_);
    cancelled_ = true;
  }
  changed_.notify_all();
}

void PartWindow::wait_for_end() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return ended_; });
}

std::shared_ptr<PartWindow::Part> PartWindow::next() {
  std::unique_lock lock(mutex_);
  uint64_t bytes = 0;
  changed_.wait(lock, [&] {
    if (cancelled_) return true;
    const uint64_t begin = taken_ * part_bytes_;
    bytes = length_ ? std::min(part_bytes_, *length_ - std::min(*length_, begin)) : part_bytes_;
    if (bytes == 0) return true;
    const auto found = parts_.find(taken_);
    if (found == parts_.end() || found->second.written < bytes) return length_.has_value();
    // The last part may end in padding, which only the object's length reveals.
    return length_.has_value() || goes_on_until_ > begin + part_bytes_;
  });
  check();
  if (bytes == 0) return nullptr;
  const auto found = parts_.find(taken_);
  if (found == parts_.end() || found->second.written < bytes) {
    throw Error(Error::Kind::invalid, path_ + " was finished with bytes missing", path_, taken_ * part_bytes_);
  }
  auto part = std::make_shared<Part>(shared_from_this(), std::move(found->second.memory), bytes);
  parts_.erase(found);
  ++taken_;
  lock.unlock();
  changed_.notify_all();
  return part;
}

void PartWindow::uploaded() {
  {
    const std::lock_guard lock(mutex_);
    ended_ = true;
  }
  changed_.notify_all();
}

void PartWindow::fail(const Error& error) {
  {
    const std::lock_guard lock(mutex_);
    if (!error_) error_ = error;
    ended_ = true;
  }
  changed_.notify_all();
}

void set_remote_store(RemoteStore store) {
  registered() = std::move(store);
}

bool is_remote(std::string_view path) {
  const size_t end = path.find("://");
  return end != std::string_view::npos && end != 0 && std::all_of(path.begin(), path.begin() + end, [](char letter) {
           return std::isalnum(static_cast<unsigned char>(letter)) != 0 || letter == '+' || letter == '.' ||
                  letter == '-';
         });
}

const RemoteStore& remote_store() {
  if (!registered().open) throw Error::invalid("no store is registered for paths with a scheme");
  return registered();
}

uint64_t part_bytes_for(uint64_t expected_bytes, uint64_t unit, uint64_t most) {
  const uint64_t least = std::max(kLeastPart, expected_bytes / kMostParts);
  const uint64_t wanted = std::clamp(expected_bytes, least, std::max(least, most));
  return (wanted + unit - 1) / unit * unit;
}

}  // namespace vescale_ckpt::io
