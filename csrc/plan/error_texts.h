// Writes chunks and ranks as text for errors.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace vescale_ckpt::plan {

// Returns "(4, 8)".
std::string tuple_text(std::span<const int64_t> values);

// Returns "rank 3" or "ranks 0, 5-7, ... (1200 in all)". `ranks` are ascending.
std::string ranks_text(std::span<const uint32_t> ranks);

// Returns "rank 0 has shape (4, 8), ranks 3, 5-7 have (4, 16)". `values`: each value with its ranks, ascending.
std::string disagreement_text(std::string_view property,
                              std::span<const std::pair<std::string, std::vector<uint32_t>>> values);

}  // namespace vescale_ckpt::plan
