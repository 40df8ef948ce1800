// A hash table from byte strings to numbers, for millions of short keys. It does not copy the strings.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

namespace vescale_ckpt::metadata {

// The strings must outlive the table. Not thread-safe.
class ViewTable {
 public:
  static constexpr uint32_t kNone = UINT32_MAX;

  // kNone if it is not there.
  uint32_t find(std::string_view key) const { return slots_.empty() ? kNone : slots_[slot(key, hash(key))].value; }

  // Added with kNone if it is not there. Valid until the next call.
  uint32_t& operator[](std::string_view key) {
    if (size_ >= slots_.size() / 2) grow();
    const uint32_t hashed = hash(key);
    Slot& found = slots_[slot(key, hashed)];
    if (!found.used) {
      found = {key, hashed, kNone, true};
      ++size_;
    }
    return found.value;
  }

  size_t size() const { return size_; }

 private:
  struct Slot {
    std::string_view key;
    uint32_t hash = 0;
    uint32_t value = kNone;
    bool used = false;
  };

  static uint32_t hash(std::string_view key) { return static_cast<uint32_t>(std::hash<std::string_view>{}(key)); }

  size_t slot(std::string_view key, uint32_t hashed) const {
    size_t at = hashed & (slots_.size() - 1);
    while (slots_[at].used && (slots_[at].hash != hashed || slots_[at].key != key)) at = (at + 1) & (slots_.size() - 1);
    return at;
  }

  void grow() {
    std::vector<Slot> old(std::max<size_t>(16, slots_.size() * 2));
    old.swap(slots_);
    for (const Slot& moved : old) {
      if (moved.used) slots_[slot(moved.key, moved.hash)] = moved;
    }
  }

  std::vector<Slot> slots_;
  size_t size_ = 0;
};

}  // namespace vescale_ckpt::metadata
