// Bytes of which no two seeds give the same, and chunks of one dimension, for tests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "fingerprint/fingerprint.h"

namespace vescale_ckpt::fingerprint {

inline std::vector<std::byte> random_bytes(size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> bytes(count);
  for (std::byte& byte : bytes) byte = std::byte(random());
  return bytes;
}

// A chunk of one dimension. `place`: in its tensor.
inline Chunk flat(const std::byte* memory, size_t bytes, int64_t place) {
  const auto size = static_cast<int64_t>(bytes);
  const std::vector<int64_t> shape{place + size}, offset{place}, sizes{size}, stride{1};
  return {io::Box(1, shape, offset, sizes, stride), memory};
}

inline Value of_bytes(const std::byte* memory, size_t bytes, int64_t place) {
  return of_chunks(std::vector<Chunk>{flat(memory, bytes, place)}, 1)[0];
}

}  // namespace vescale_ckpt::fingerprint
