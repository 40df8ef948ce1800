// A 128-bit fingerprint of bytes: MurmurHash3 x64 128. Equal on every machine of one byte order; no defence against
// forgery.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace vescale_ckpt::plan {

using Hash128 = std::array<uint64_t, 2>;

Hash128 hash128(std::span<const std::byte> bytes);

}  // namespace vescale_ckpt::plan
