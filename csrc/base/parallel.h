// A loop over independent steps, on several threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>

#include "base/workers.h"

namespace vescale_ckpt {

// Calls make_body() once a thread (for what that thread reuses), and what it returns as body(i) for each i < count, in
// batches of `step`, in no order. Throws what the first failing call threw.
template <typename MakeBody>
void parallel_for(unsigned threads, size_t count, size_t step, const MakeBody& make_body) {
  std::atomic<size_t> next{0};
  const size_t batches = (count + step - 1) / step;
  run_workers(static_cast<unsigned>(std::min<size_t>(threads, batches)), [&](const std::atomic<bool>& stop) {
    auto body = make_body();
    while (!stop) {
      const size_t begin = next.fetch_add(step);
      if (begin >= count) return;
      for (size_t i = begin; i < std::min(count, begin + step); ++i) body(i);
    }
  });
}

}  // namespace vescale_ckpt
