// Checks archives of torch.save, or finds a tensor in them, where they lie in a data file. Of an archive of any size no
// more is in memory than its directory, a pickle and one piece.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "format/torch_record.h"
#include "io/file.h"

namespace vescale_ckpt::read {

struct ArchiveCheck {
  std::string wrong;              // empty: it is sound
  uint64_t offset = 0;            // of what is wrong, in the file
  uint64_t unverified_bytes = 0;  // of entries that were written without checksums
  std::string harmless;           // damage where no reader looks; empty: none
};

// Checks the archive of `length` bytes at `offset`. If `crc` is at least 0 the whole archive must have that CRC-32. An
// I/O error is reported in `wrong` as well. Throws only std::bad_alloc.
ArchiveCheck check_archive_in(io::File& file, uint64_t offset, uint64_t length, int64_t crc);

struct TensorBody {
  uint64_t offset;  // in the file
  uint32_t crc;     // as the archive has it
};

// The bytes of the tensor in the archive of `length` bytes at `offset`, if its pickle is that of `framing` and its
// layout that of another version of torch. nullopt for any other archive, or a damaged one. Throws Error (io).
std::optional<TensorBody> find_tensor(io::File& file, uint64_t offset, uint64_t length,
                                      const format::TensorRecord& framing);

}  // namespace vescale_ckpt::read
