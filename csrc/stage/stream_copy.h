// A copy that bypasses the processor's caches. A snapshot is not read before it is written to disk, so in the cache it
// would only replace the trainer's data. Target lines are not fetched before they are overwritten, which saves a third
// of the memory traffic.
#pragma once

#include <cstddef>
#include <cstdint>

namespace vescale_ckpt::stage {

// As memcpy, but before the bytes are handed to another thread this one calls finish_stream_copies(). `next`: what will
// be copied after it, which is fetched meanwhile; null: unknown. It is not read and may be any address.
void stream_copy(std::byte* target, const std::byte* source, uint64_t bytes, const std::byte* next = nullptr);

// Orders all copies of this thread before what it does next: once for many of them.
void finish_stream_copies();

}  // namespace vescale_ckpt::stage
