// Fingerprints of chunks in the memory of a device, which its kernel reads in place (device/word_sums.h).
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "device/device.h"
#include "fingerprint/fingerprint.h"

namespace vescale_ckpt::fingerprint {

// Whether the kernel reads a chunk: its warps want runs that are not short.
bool is_for_kernel(const io::Box& box);

// Returns the fingerprint of each chunk, for all of which `is_for_kernel` is true, after the queued work of `producer`.
// Returns nullopt if the accelerator has no kernel or no free memory, or computes known values wrong. Throws
// Error(device).
std::optional<std::vector<Value>> of_device_chunks(device::Accelerator& accelerator, device::StreamHandle producer,
                                                   std::span<const Chunk> chunks);

// The powers of the point, which are made at the first call.
const device::WordPowers& word_powers();

namespace detail {  // for tests
// Adds a chunk to the table. Returns false if there is no room.
bool add_to_table(const Chunk& chunk, device::WordTable& table);
}  // namespace detail

}  // namespace vescale_ckpt::fingerprint
