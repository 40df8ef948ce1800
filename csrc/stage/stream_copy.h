// Copies that pass the processor's caches by. A snapshot is not read before it is written to disk, so its lines would
// only push out the trainer's; and a line that is not fetched before it is overwritten saves a third of the traffic.
#pragma once

#include <cstddef>
#include <cstdint>

namespace vescale_ckpt::stage {

// As memcpy. Other threads see the bytes after the usual synchronisation with this one.
void stream_copy(std::byte* target, const std::byte* source, uint64_t bytes);

}  // namespace vescale_ckpt::stage
