// Headers for tests: what a file starts with, and the error that it gives.
#pragma once

#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "hf/safetensors.h"

namespace vescale_ckpt::hf {

inline std::string head_of(std::string_view json) {
  const uint64_t length = json.size();
  std::string head(reinterpret_cast<const char*>(&length), sizeof length);
  return head.append(json);
}

// One tensor's entry.
inline std::string entry(std::string_view name, std::string_view dtype, std::string_view shape,
                         std::string_view offsets) {
  return "\"" + std::string(name) + "\":{\"dtype\":\"" + std::string(dtype) + "\",\"shape\":" + std::string(shape) +
         ",\"data_offsets\":" + std::string(offsets) + "}";
}

inline SafetensorsHeader parse_file(std::string_view head, uint64_t data_bytes, bool checksums = true) {
  const uint64_t file_bytes = head.size() + data_bytes;
  const uint64_t bytes = SafetensorsHeader::head_bytes(head.substr(0, 8), file_bytes, "file");
  if (bytes > head.size()) throw Error::corrupt("the test gave too little", "file", 0);
  return SafetensorsHeader::parse(head.substr(0, bytes), file_bytes, "file", checksums);
}

inline std::optional<Error> refusal(std::string_view head, uint64_t data_bytes, bool checksums = true) {
  try {
    parse_file(head, data_bytes, checksums);
  } catch (const Error& error) {
    return error;
  }
  return std::nullopt;
}

}  // namespace vescale_ckpt::hf
