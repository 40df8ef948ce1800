// Hashes of tensors, for saves that do not write again what an older checkpoint has: docs/format.md, "Content ids".
//
// Each block of 8 KiB of a tensor's bytes in C order (the last one filled up with zeros) gets two NH hashes (Black,
// Halevi, Krawczyk, Krovetz, Rogaway: UMAC) under independent keys. NH proves for any two different blocks that both
// hashes are equal for at most one of 2^128 keys. So the keys must be random, and chosen without knowing the tensors.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "io/transfer_loop.h"
#include "write/writer.h"

namespace vescale_ckpt::write {

inline constexpr uint64_t kHashedBlock = 8 << 10;
inline constexpr size_t kHashKeyWords = 2 * kHashedBlock / sizeof(uint64_t);

struct TensorHashes {
  std::vector<uint64_t> blocks;  // four words a block: both hashes, the low word first
  uint32_t crc = 0;              // CRC-32 of all bytes
};

// Reads each tensor once, with the threads and the priority of `options`. `key`: kHashKeyWords words. Throws
// Error(invalid).
std::vector<TensorHashes> hash_tensors(std::span<const RecordSource> tensors, std::span<const uint64_t> key,
                                       const io::EngineOptions& options);

}  // namespace vescale_ckpt::write
