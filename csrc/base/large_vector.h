// A std::vector for tables of millions of rows.
//
// Its memory is in huge pages where the system has them: the first touch of a gigabyte in small ones takes longer than
// planning on it. And resize() leaves new elements as they are, to be written by several threads at once.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>
#include <utility>
#include <vector>

namespace vescale_ckpt {

template <typename T>
struct LargeAllocator {
  using value_type = T;

  LargeAllocator() = default;
  template <typename Other>
  LargeAllocator(const LargeAllocator<Other>&) {}

  T* allocate(size_t count) {
    constexpr size_t kHugePage = size_t{2} << 20;
    if (count > SIZE_MAX / sizeof(T) - kHugePage) throw std::bad_array_new_length();
    const size_t bytes = count * sizeof(T);
    const bool huge = bytes >= 2 * kHugePage;
    void* data = huge ? std::aligned_alloc(kHugePage, (bytes + kHugePage - 1) / kHugePage * kHugePage)
                      : std::malloc(bytes == 0 ? 1 : bytes);
    if (data == nullptr) throw std::bad_alloc();
    if (huge) ::madvise(data, bytes, MADV_HUGEPAGE);  // a hint: refused, the pages are small
    return static_cast<T*>(data);
  }
  void deallocate(T* data, size_t) { std::free(data); }

  template <typename Element, typename... Arguments>
  void construct(Element* at, Arguments&&... arguments) {
    if constexpr (sizeof...(Arguments) == 0) {
      ::new (static_cast<void*>(at)) Element;
    } else {
      std::construct_at(at, std::forward<Arguments>(arguments)...);
    }
  }

  bool operator==(const LargeAllocator&) const = default;
};

template <typename T>
using LargeVector = std::vector<T, LargeAllocator<T>>;

}  // namespace vescale_ckpt
