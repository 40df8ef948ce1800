// Hashes of a few elements of tensors in host memory, by which ranks find out whether they hold the same.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "state/tables.h"

namespace vescale_ckpt::state {

// `boxes`: rows of words, one behind another: tensor, dimensions n, n offsets in it, n sizes; none is empty.
// `elements`: how many of each box are looked at, or all that it has: evenly from one to the next in C's order, so that
// the hash does not depend on where and how they lie. `factors`: as many; twice as many where elements have 16 bytes.
//
// A hash is the sum of the factors, each times an element as a signed integer (of 16 bytes: two), whose upper bits are
// first put on its lower ones; modulo 2^64. The memory of the tensors must be there. Throws Error (invalid) for rows
// that do not fit the tensors.
std::vector<uint64_t> replica_hashes(const TensorTable& tensors, std::span<const int64_t> boxes, uint32_t elements,
                                     std::span<const uint64_t> factors);

}  // namespace vescale_ckpt::state
