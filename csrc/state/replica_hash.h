// Hashes a few elements of chunks in host memory, so that ranks can compare their replicas.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "state/tables.h"

namespace vescale_ckpt::state {

// The number of elements that are hashed of a chunk; a chunk with fewer is hashed whole.
struct Sample {
  uint32_t of_small, of_large;
  uint64_t large_bytes;  // a chunk with so many bytes counts as large

  uint32_t count(uint64_t bytes) const { return bytes >= large_bytes ? of_large : of_small; }
};

constexpr uint64_t kNotHashed = 0;

// Returns a hash of the chunk of each item; kNotHashed if the engine may not use its memory. Items must be tensors with
// elements. The hashed elements are evenly spaced in C's order, so the hash does not depend on strides. `factors`: one
// for each hashed element, or two if elements have 16 bytes.
//
// A hash is a sum over elements modulo 2^64. Each element is taken as a signed integer (16 bytes as two integers), its
// upper bits are mixed into the lower bits, and the result is multiplied by its factor. A sum of 0 is replaced by 1.
// Throws Error (invalid) for items that do not fit their tensors.
std::vector<uint64_t> replica_hashes(const StateTables& state, std::span<const uint32_t> items, const Sample& sample,
                                     std::span<const uint64_t> factors);

struct OfferedHashes {
  std::vector<uint64_t> hashes;  // of each item of the inventory; 0: it is not compared
  std::vector<uint32_t> rest;    // items that are to be compared, whose memory the engine may not use
};

// Hashes all tensors. Throws as above.
OfferedHashes offered_hashes(const StateTables& state, const Sample& sample, std::span<const uint64_t> factors);

}  // namespace vescale_ckpt::state
