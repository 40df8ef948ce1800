// Writes `.metadata` for stock DCP from packed tables, opcode by opcode, without Python objects.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include "metadata/catalog.h"
#include "metadata/key_paths.h"
#include "metadata/record_locations.h"

namespace vescale_ckpt::metadata {

struct MetadataContent {
  const Catalog& catalog;
  const RecordLocations& locations;
  const KeyPaths& paths;  // if there are none, planner_data is None
  std::string_view checkpoint_id, save_id;
  std::optional<std::string_view> structure = {};  // the facts that paths leave out, as text; nullopt: unknown
};

// Returns an upper bound of the bytes that write_metadata writes, about three times as many.
uint64_t most_metadata_bytes(const MetadataContent& content);

struct WrittenMetadata {
  uint64_t bytes;  // length of the file: pickle and trailer
  uint64_t pickle_bytes;
  uint32_t pickle_crc;
};

// Writes the content of `.metadata` to `out`, which has room for most_metadata_bytes. Throws Error (invalid) if a
// location is invalid.
WrittenMetadata write_metadata(const MetadataContent& content, std::byte* out);

// The bytes after our pickle in `.metadata`; unpicklers stop before them.
struct MetadataTrailer {
  static constexpr size_t kBytes = 16;
  static constexpr std::string_view kMagic = "VSCKMDT1";
  uint32_t length;  // low 32 bits of the pickle's length
  uint32_t crc;     // CRC-32 of the pickle
};

}  // namespace vescale_ckpt::metadata
