// CRC-32 as zip uses it (polynomial 0x04C11DB7, reflected), so that one pass serves both the checksum field of
// a torch.save record and the checksums of blocks. Thread-safe; no state.
#pragma once

#include <cstddef>
#include <cstdint>

namespace vescale_ckpt {

// The checksum of `size` bytes appended to data whose checksum is `crc` (0 for none).
uint32_t crc32(uint32_t crc, const void* data, size_t size);

// Copies `size` bytes and returns the checksum of the copy, reading each source byte once: they agree even if another
// thread changes the source meanwhile.
uint32_t copy_crc32(void* target, const void* source, size_t size, uint32_t crc);

// The checksum of A followed by B from those of A and B; `size_b` is B's length in bytes.
uint32_t crc32_combine(uint32_t crc_a, uint32_t crc_b, uint64_t size_b);

namespace detail {  // each implementation alone, for tests; with `to` it copies there and checksums the copy
uint32_t crc32_table(uint32_t crc, const unsigned char* data, size_t size, unsigned char* to);
#if defined(__x86_64__) || defined(__aarch64__)
bool have_folding();  // by carry-less multiplication
uint32_t crc32_folding(uint32_t crc, const unsigned char* data, size_t size, unsigned char* to);
#endif
#if defined(__x86_64__)
bool have_avx512();
uint32_t crc32_avx512(uint32_t crc, const unsigned char* data, size_t size, unsigned char* to);
#endif
}  // namespace detail

}  // namespace vescale_ckpt
