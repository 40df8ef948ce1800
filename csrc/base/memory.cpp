#include "base/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <memory>
#include <new>
#include <tuple>

#include "base/system.h"

namespace vescale_ckpt {
namespace {

// Under the usual "madvise" policy a mapping becomes huge only if it is both aligned and advised.
std::byte* map_huge(uint64_t bytes) {
  void* map = ::mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (map == MAP_FAILED) throw std::bad_alloc();
  const auto start = reinterpret_cast<uintptr_t>(map);
  const uintptr_t aligned = align_up(start, kHugePage);
  if (aligned != start) ::munmap(map, aligned - start);
  if (const uint64_t behind = start + kHugePage - aligned; behind != 0) {
    ::munmap(reinterpret_cast<void*>(aligned + bytes), behind);
  }
  ::madvise(reinterpret_cast<void*>(aligned), bytes, MADV_HUGEPAGE);
  ::madvise(reinterpret_cast<void*>(aligned), bytes, MADV_DONTFORK);  // a child has no use for our slots
  return reinterpret_cast<std::byte*>(aligned);
}

}  // namespace

void advise_huge_pages(std::byte* memory, uint64_t bytes) {
  const auto address = reinterpret_cast<uintptr_t>(memory);
  const uint64_t begin = align_up(address, system::page_bytes());
  const uint64_t end = align_down(address + bytes, system::page_bytes());
  if (begin < end) system::advise(reinterpret_cast<std::byte*>(begin), end - begin, MADV_HUGEPAGE);
}

Slot::~Slot() {
  if (arena_ != nullptr) arena_->release(data_);
}

Arena::Arena(uint64_t slot_bytes, uint64_t budget_bytes)
    : slot_bytes_(align_up(slot_bytes, kBlock)), limit_(std::max<uint64_t>(1, budget_bytes / slot_bytes_)) {}

Arena::~Arena() {
  for (std::byte* data : free_) ::munmap(data, align_up(slot_bytes_, kHugePage));
}

Slot Arena::acquire() {
  std::unique_lock lock(mutex_);
  freed_.wait(lock, [&] { return !free_.empty() || allocated_ < limit_; });
  if (free_.empty()) {
    std::byte* data = map_huge(align_up(slot_bytes_, kHugePage));
    ++allocated_;
    return Slot(this, data);
  }
  std::byte* data = free_.back();  // last in, first out: the warmest
  free_.pop_back();
  return Slot(this, data);
}

void Arena::release(std::byte* data) {
  {
    const std::lock_guard lock(mutex_);
    free_.push_back(data);
  }
  freed_.notify_one();
}

Arena& shared_arena(uint64_t slot_bytes, uint64_t budget_bytes) {
  static std::mutex mutex;
  // Leaked on purpose: background threads may hold slots while static destructors run.
  static auto& arenas = *new std::map<std::tuple<pid_t, uint64_t, uint64_t>, std::unique_ptr<Arena>>();
  const std::lock_guard lock(mutex);
  auto& arena = arenas[{::getpid(), slot_bytes, budget_bytes}];
  if (!arena) arena = std::make_unique<Arena>(slot_bytes, budget_bytes);
  return *arena;
}

}  // namespace vescale_ckpt
