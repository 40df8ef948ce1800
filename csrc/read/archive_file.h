// Checks archives of torch.save where they lie in a data file, whatever their size: of one no more is in memory than
// its directory, a pickle and one piece.
#pragma once

#include <cstdint>
#include <string>

#include "io/file.h"

namespace vescale_ckpt::read {

struct ArchiveCheck {
  std::string wrong;              // empty: it is sound
  uint64_t offset = 0;            // of what is wrong, in the file
  uint64_t unverified_bytes = 0;  // of entries that were written without checksums
  std::string harmless;           // what is damaged, but nobody reads: empty if nothing
};

// The archive of `length` bytes at `offset`. With `crc` not negative all of it must have that CRC-32.
// What the disk cannot give is wrong, too: it throws nothing but std::bad_alloc.
ArchiveCheck check_archive_in(io::File& file, uint64_t offset, uint64_t length, int64_t crc);

}  // namespace vescale_ckpt::read
