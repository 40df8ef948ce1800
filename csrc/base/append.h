// Appends numbers to a table's row.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace vescale_ckpt {

inline void append(std::vector<int64_t>& to, std::span<const int64_t> words) {
  to.insert(to.end(), words.begin(), words.end());
}

}  // namespace vescale_ckpt
