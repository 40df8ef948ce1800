// Opens safetensors files.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "hf/safetensors.h"
#include "io/file.h"
#include "io/transfer_loop.h"

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
  uint32_t head_crc = 0;  // CRC-32 of the bytes before the data: tells this file from another of its name
};

}  // namespace vescale_ckpt::hf
