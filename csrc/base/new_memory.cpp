#include "base/new_memory.h"

#include <sys/mman.h>

#include <algorithm>

#include "base/memory.h"
#include "base/system.h"

namespace vescale_ckpt {

bool PageChoice::next_is_huge() {
  const bool huge_is_better = huge_.load() <= single_.load();
  return steps_.fetch_add(1) % kSteps == 0 ? !huge_is_better : huge_is_better;
}

void PageChoice::took(bool huge, uint64_t nanoseconds) {
  (huge ? huge_ : single_).store(nanoseconds);
}

NewMemory::NewMemory(std::vector<std::span<std::byte>> ranges, PageChoice& choice) : choice_(choice) {
  const uint64_t page = system::page_bytes();
  std::ranges::sort(ranges, {}, [](std::span<std::byte> range) { return range.data(); });
  for (size_t i = 0; i < ranges.size();) {
    const auto begin = reinterpret_cast<uintptr_t>(ranges[i].data());
    uintptr_t end = begin;
    for (; i < ranges.size(); ++i) {
      const auto next = reinterpret_cast<uintptr_t>(ranges[i].data());
      if (next > end && next - end > kBlock) break;
      end = std::max<uintptr_t>(end, next + ranges[i].size());
    }
    if (end - begin < kHugePage) continue;
    const uintptr_t first = align_down(begin, page), last = align_up(end, page);
    const uint64_t steps = (last - 1) / kHugePage - first / kHugePage + 1;
    ranges_.push_back(
        {first, last, std::make_unique<std::atomic<bool>[]>(steps), std::make_unique<std::atomic<bool>>()});
    ranges_.back().advise(true);
  }
}

NewMemory::~NewMemory() {
  for (const Range& range : ranges_) range.advise(true);
}

// The whole range at once, and only if the last advice was another one: the kernel stops all threads that take pages of
// this process meanwhile.
void NewMemory::Range::advise(bool wants_huge) const {
  if (huge->exchange(wants_huge) == wants_huge) return;
  system::advise(reinterpret_cast<std::byte*>(begin), end - begin, wants_huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
}

void NewMemory::take_pages(const std::byte* begin, uint64_t bytes) {
  const auto from = reinterpret_cast<uintptr_t>(begin);
  const auto behind = std::ranges::upper_bound(ranges_, from, {}, &Range::begin);
  if (bytes == 0 || behind == ranges_.begin()) return;
  const Range& range = *std::prev(behind);
  const uintptr_t to = std::min(from + bytes, range.end);
  for (uintptr_t step = align_down(from, kHugePage); step < to; step += kHugePage) {
    if (range.taken[step / kHugePage - range.begin / kHugePage].exchange(true)) continue;
    const uintptr_t first = std::max(step, range.begin);
    auto* const data = reinterpret_cast<std::byte*>(first);
    const uint64_t size = std::min(step + kHugePage, range.end) - first;
    const bool whole = size == kHugePage;
    const bool huge = !whole || choice_.next_is_huge();
    if (whole) range.advise(huge);
    const uint64_t start = system::thread_nanoseconds();
    const int result = system::populate(data, size);
    if (whole && result == 0) choice_.took(huge, system::thread_nanoseconds() - start);
  }
}

PageChoice& NewMemory::shared_choice() {
  static PageChoice choice;
  return choice;
}

}  // namespace vescale_ckpt
