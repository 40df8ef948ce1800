// Hashes of a few elements of boxes in host memory, by which ranks find out whether they hold the same.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "state/tables.h"

namespace vescale_ckpt::state {

// How many elements of a box are looked at, or all that it has.
struct Sample {
  uint32_t of_small, of_large;
  uint64_t large_bytes;  // of the smallest box that counts as large

  uint32_t count(uint64_t bytes) const { return bytes >= large_bytes ? of_large : of_small; }
};

constexpr uint64_t kNotHashed = 0;

// For each of the items, which are tensors with elements, a hash of its box; kNotHashed if the engine may not use its
// memory. The elements lie evenly from one to the next in C's order, so that the hash does not depend on where and how
// they lie. `factors`: as many as elements are looked at; twice as many where elements have 16 bytes.
//
// A hash is the sum of the factors, each times an element as a signed integer (of 16 bytes: two), whose upper bits are
// first put on its lower ones; modulo 2^64, and 1 in place of 0. Throws Error (invalid) for items that do not fit their
// tensors.
std::vector<uint64_t> replica_hashes(const StateTables& state, std::span<const uint32_t> items, const Sample& sample,
                                     std::span<const uint64_t> factors);

}  // namespace vescale_ckpt::state
