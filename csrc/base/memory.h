// Slots: equal pieces of aligned, huge-page memory that bytes pass through, from one arena with a budget.
//
// An arena never holds more than its budget; who asks for a slot when all are out waits. Memory stays with the arena
// between uses, because first touch costs more than the disk. Thread-safe.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

namespace vescale_ckpt {

inline constexpr uint64_t kHugePage = 2 << 20;  // bytes; mappings are aligned to it
inline constexpr uint64_t kBlock = 4096;        // what direct I/O is cut on: a multiple of every device's block in use

constexpr uint64_t align_down(uint64_t value, uint64_t alignment) {
  return value / alignment * alignment;
}
constexpr uint64_t align_up(uint64_t value, uint64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}
// The smallest offset >= `from` that is congruent to `place` modulo the block size.
constexpr uint64_t next_congruent(uint64_t from, uint64_t place) {
  return from + (place - from) % kBlock;  // where it wraps, it does so by whole blocks
}

// Asks for huge pages behind memory that is about to be filled for the first time. A hint: errors are ignored.
void advise_huge_pages(std::byte* memory, uint64_t bytes);

class Arena;

// One slot, given back on destruction.
class Slot {
 public:
  Slot(Arena* arena, std::byte* data) : arena_(arena), data_(data) {}
  Slot(Slot&& other) noexcept
      : arena_(std::exchange(other.arena_, nullptr)), data_(std::exchange(other.data_, nullptr)) {}
  Slot& operator=(Slot&& other) noexcept {
    std::swap(arena_, other.arena_);
    std::swap(data_, other.data_);
    return *this;
  }
  ~Slot();
  std::byte* data() const { return data_; }

 private:
  Arena* arena_;
  std::byte* data_;
};

class Arena {
 public:
  // `budget_bytes` is rounded down to whole slots, but one slot is always allowed.
  Arena(uint64_t slot_bytes, uint64_t budget_bytes);
  ~Arena();  // no slot may be out
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  uint64_t slot_bytes() const { return slot_bytes_; }
  uint64_t slots() const { return limit_; }

  Slot acquire();  // waits for a free one; throws std::bad_alloc if the system has no memory

 private:
  friend class Slot;
  void release(std::byte* data);

  const uint64_t slot_bytes_;
  const uint64_t limit_;
  std::mutex mutex_;  // guards all below
  std::condition_variable freed_;
  std::vector<std::byte*> free_;
  uint64_t allocated_ = 0;  // slots
};

// The arena that all writers and readers of this process share: one for each pair of sizes, never freed, safe after
// fork (the child gets its own).
Arena& shared_arena(uint64_t slot_bytes, uint64_t budget_bytes);

}  // namespace vescale_ckpt
