// Copies memory past the processor's caches. A snapshot is not read before it is written to disk, so in the cache it
// would only replace the trainer's data. Target lines are not fetched before they are overwritten, which saves a third
// of the memory traffic.
#pragma once

#include <cstddef>
#include <cstdint>

namespace vescale_ckpt::stage {

// Copies like memcpy. Call finish_stream_copies() before another thread uses the bytes. `next`: the source of the next
// copy, which is prefetched; null: unknown. It may be any address.
void stream_copy(std::byte* target, const std::byte* source, uint64_t bytes, const std::byte* next = nullptr);

// Orders all copies of this thread before its later writes. One call is enough for many copies.
void finish_stream_copies();

}  // namespace vescale_ckpt::stage
