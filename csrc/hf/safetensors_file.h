// Safetensors files: written whole, read as a whole or by boxes, checksums checked on the way.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "hf/safetensors.h"
#include "hf/safetensors_layout.h"
#include "io/file.h"
#include "read/reader.h"
#include "write/writer.h"

namespace vescale_ckpt::hf {

// A file that stays open, so that what is read later is of the same file even if another takes its name.
struct SafetensorsFile {
  // Reads and checks the header. Throws Error: io, corrupt, invalid.
  static std::shared_ptr<const SafetensorsFile> open(const std::string& path, const io::EngineOptions& options,
                                                     bool verify);
  // Length and header. Throws Error: io, corrupt, invalid.
  static std::string read_head(io::File& file);

  std::shared_ptr<io::File> file;
  SafetensorsHeader header;
  uint32_t head_crc = 0;  // of the bytes before the data: tells this file from another of its name
};

// `data`: where each tensor that `layout` was made of is, contiguous, in its order. `writer` reserved file_bytes().
// The file is complete but has its old name. Returns its length.
uint64_t write_safetensors(write::FileWriter& writer, const SafetensorsLayout& layout,
                           std::span<const std::byte* const> data, bool sync);

// Rows: file, number of the tensor in it, address, dimensions n, n offsets, n sizes, n strides (elements); or -1 for n
// and nothing behind it for a whole tensor to contiguous memory. Throws Error(invalid, row).
std::vector<read::ReadItem> parse_safetensors_table(std::span<const std::shared_ptr<const SafetensorsFile>> files,
                                                    std::span<const int64_t> table);

// Throws Error: corrupt (with the row as item), io, invalid. Bytes without checksums are counted as unverified.
std::unique_ptr<read::ReadReport> read_safetensors(std::span<const std::shared_ptr<const SafetensorsFile>> files,
                                                   std::span<const int64_t> table, bool verify,
                                                   const io::EngineOptions& options);

}  // namespace vescale_ckpt::hf
