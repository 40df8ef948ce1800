// Fingerprints of tensors that do not depend on how ranks share them.
//
// The bytes of a tensor, in C's order of its global shape, are cut into words of 6 bytes. Word w, as a little-endian
// number, is the coefficient of x^w of a polynomial; the fingerprint is the value of the polynomial at a fixed point x,
// modulo the prime 2^127 - 1. It is a sum over all words, and a word is a sum over its bytes: so the fingerprint of a
// tensor is the sum of those of its chunks, wherever they are cut, and absent bytes count as 0.
//
// Two different tensors of n words have equal fingerprints at no more than n - 1 of the 2^127 - 1 points, because their
// difference is a polynomial of a lower degree than n. For a point that is independent of the tensors, the probability
// is at most n / 2^127: 2^-95 for 16 GiB. The point is public, so this proves nothing against somebody who makes a
// collision on purpose (Carter and Wegman, "Universal classes of hash functions", 1979; Bernstein, "hash127", 1999).
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "device/device.h"
#include "fingerprint/words.h"
#include "io/box.h"
#include "state/tables.h"

namespace vescale_ckpt::fingerprint {

// A chunk of a tensor. `box`: the chunk in the whole tensor, and where its elements are in `memory`, of the host or a
// device.
struct Chunk {
  io::Box box;
  const std::byte* memory;
};

// Returns the fingerprint of each chunk in host memory.
std::vector<Value> of_chunks(std::span<const Chunk> chunks, unsigned threads);

// Returns the fingerprint of each item of a state. Kernels read what is on devices, behind the queued work of the
// framework's stream there; `runtime` may be null without streams. `rest`: the items whose memory the engine may not
// read, or no kernel reads, which have 0. Objects have 0, too. Throws Error(device).
struct ItemValues {
  std::vector<Value> values;
  std::vector<uint32_t> rest;  // ascending
};
ItemValues of_items(const state::StateTables& state, unsigned threads, device::DeviceRuntime* runtime,
                    const std::map<int, device::StreamHandle>& streams);

}  // namespace vescale_ckpt::fingerprint
