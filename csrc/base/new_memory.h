// Pages for memory that is about to be filled for the first time, huge or single, whichever the system gives sooner.
//
// Huge pages are zeroed at twice the speed, and disks write to them faster. But a hypervisor that takes unused memory
// back takes whole huge pages, and needs 20 times as long to bring one in again; single ones often come from parts of
// memory that it has left alone. Which of them costs less changes within one load, so each step is timed.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace vescale_ckpt {

// Chooses the kind whose last step took less time, and once in kSteps the other one. Tries one step in huge pages
// first, and takes single ones until it is done. Thread-safe, also after fork.
class PageChoice {
 public:
  static constexpr uint64_t kSteps = 256;

  bool next_is_huge();
  void took(bool huge, uint64_t nanoseconds);  // for one step

 private:
  static constexpr uint64_t kUsual = 1'000'000;  // nanoseconds for single pages, until they have been timed

  std::atomic<uint64_t> huge_{UINT64_MAX}, single_{kUsual};  // nanoseconds of the last step
  std::atomic<uint64_t> steps_{0};
};

// Ranges of new memory. They must outlive this. Thread-safe, while other threads fill them as well.
class NewMemory {
 public:
  // Asks for huge pages behind all ranges. Ranges that nearly touch, as those of many small allocations do, count as
  // one.
  explicit NewMemory(std::vector<std::span<std::byte>> ranges, PageChoice& choice = shared_choice());
  // Asks for huge pages again where single ones were taken: the kernel may join them later.
  ~NewMemory();
  NewMemory(const NewMemory&) = delete;
  NewMemory& operator=(const NewMemory&) = delete;

  // Takes the pages of a part, and of the rest of its huge pages, if none of both has been asked for before. What is
  // there is kept. Where the system cannot, the pages come when they are filled.
  void take_pages(const std::byte* begin, uint64_t bytes);

 private:
  // Of this process: what a load has learnt is of use for the next.
  static PageChoice& shared_choice();

  struct Range {
    uintptr_t begin, end;                        // whole pages
    std::unique_ptr<std::atomic<bool>[]> taken;  // each step, as addresses are divided by steps
    std::unique_ptr<std::atomic<bool>> huge;     // what was asked for last
    void advise(bool wants_huge) const;
  };
  std::vector<Range> ranges_;  // by address
  PageChoice& choice_;
};

}  // namespace vescale_ckpt
