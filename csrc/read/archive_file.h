// Checks archives of torch.save in a data file, or finds a tensor in them. Only the directory, a pickle and one piece
// of an archive are in memory at a time.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "format/torch_record.h"
#include "io/file.h"

namespace vescale_ckpt::read {

struct ArchiveCheck {
  std::string wrong;              // what is wrong; empty: the archive is sound
  uint64_t offset = 0;            // place of the damage in the file
  uint64_t unverified_bytes = 0;  // bytes of entries without checksums
  std::string harmless;           // damage that no reader notices; empty: none
};

// Checks the archive of `length` bytes at `offset`. If `crc` is at least 0, the whole archive must have that CRC-32.
// Throws Error (io): then nothing is known about the archive.
ArchiveCheck check_archive_in(io::File& file, uint64_t offset, uint64_t length, int64_t crc);

struct TensorBody {
  uint64_t offset;  // offset in the file
  uint32_t crc;     // CRC-32 in the archive
};

// Finds the bytes of the tensor in the archive of `length` bytes at `offset`, if its pickle equals that of `framing`
// and its layout is that of another version of torch. nullopt for any other archive or a damaged one. Throws Error
// (io).
std::optional<TensorBody> find_tensor(io::File& file, uint64_t offset, uint64_t length,
                                      const format::TensorRecord& framing);

}  // namespace vescale_ckpt::read
