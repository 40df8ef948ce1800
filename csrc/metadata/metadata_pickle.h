// Writes `.metadata` for stock DCP from packed tables, opcode by opcode, without Python objects.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
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

// The bytes after our pickle in `.metadata`; unpicklers stop before them.
struct MetadataTrailer {
  static constexpr size_t kBytes = 16;
  static constexpr std::string_view kMagic = "VSCKMDT1";
  uint32_t length;  // low 32 bits of the pickle's length
  uint32_t crc;     // CRC-32 of the pickle
};

struct WrittenMetadata {
  uint64_t bytes;  // length of the file: pickle and trailer
  uint64_t pickle_bytes;
  uint32_t pickle_crc;
  std::array<std::byte, MetadataTrailer::kBytes> trailer;
};

// Takes bytes `offset` .. `offset` + size of `.metadata`. Several threads call it, in any order.
using MetadataSink = std::function<void(uint64_t offset, std::span<const std::byte> bytes)>;

// Makes the content of `.metadata` on up to `threads` threads, in blocks of a few MiB. Throws Error (invalid) if a
// location is invalid, and what the sink throws.
WrittenMetadata write_metadata(const MetadataContent& content, unsigned threads, const MetadataSink& sink);

}  // namespace vescale_ckpt::metadata
