// Writes `.metadata` as stock DCP reads it, from packed tables: opcode by opcode, without Python objects.
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
  const KeyPaths& paths;  // of none: planner_data is None
  std::string_view checkpoint_id, save_id;
  std::optional<std::string_view> structure = {};  // what the paths do not say of keys, as text; nullopt: unknown
};

// An upper bound of what write_metadata writes, about three times as much.
uint64_t most_metadata_bytes(const MetadataContent& content);

struct WrittenMetadata {
  uint64_t bytes;  // of the file: pickle and trailer
  uint64_t pickle_bytes;
  uint32_t pickle_crc;
};

// Writes the content of `.metadata` to `out`, which has room for most_metadata_bytes. Throws Error (invalid) where the
// locations make no sense.
WrittenMetadata write_metadata(const MetadataContent& content, std::byte* out);

// The bytes after our pickle in `.metadata`; unpicklers stop before them.
struct MetadataTrailer {
  static constexpr size_t kBytes = 16;
  static constexpr std::string_view kMagic = "VSCKMDT1";
  uint32_t length;  // of the pickle, its low 32 bits
  uint32_t crc;     // of the pickle
};

}  // namespace vescale_ckpt::metadata
