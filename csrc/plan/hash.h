// Computes a 128-bit fingerprint of bytes: MurmurHash3 x64 128. Machines of one byte order get equal results. It gives
// no protection against forgery.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace vescale_ckpt::plan {

using Hash128 = std::array<uint64_t, 2>;

Hash128 hash128(std::span<const std::byte> bytes);

}  // namespace vescale_ckpt::plan
