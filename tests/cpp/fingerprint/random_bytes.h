// Bytes of which no two seeds give the same, for tests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

namespace vescale_ckpt::fingerprint {

inline std::vector<std::byte> random_bytes(size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> bytes(count);
  for (std::byte& byte : bytes) byte = std::byte(random());
  return bytes;
}

}  // namespace vescale_ckpt::fingerprint
