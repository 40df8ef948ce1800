#include "format/safetensors_checksums.h"

#include <array>
#include <cstring>

#include "io/crc32.h"

namespace vescale_ckpt {
namespace {

// Base64 without padding.
constexpr std::string_view kDigits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

constexpr std::array<uint8_t, 256> kValues = [] {
  std::array<uint8_t, 256> values{};
  values.fill(0xFF);
  for (size_t i = 0; i < kDigits.size(); ++i) values[static_cast<unsigned char>(kDigits[i])] = static_cast<uint8_t>(i);
  return values;
}();

}  // namespace

uint64_t checksum_text_bytes(uint64_t blocks) {
  return ((blocks + 1) * sizeof(uint32_t) * 4 + 2) / 3;
}

std::string checksum_text(const SafetensorsChecksums& checksums) {
  std::string bytes(reinterpret_cast<const char*>(&checksums.head), sizeof checksums.head);
  bytes.append(reinterpret_cast<const char*>(checksums.blocks.data()), checksums.blocks.size() * sizeof(uint32_t));
  std::string text;
  text.reserve(checksum_text_bytes(checksums.blocks.size()));
  uint32_t pending = 0;
  unsigned bits = 0;
  for (const char byte : bytes) {
    pending = pending << 8 | static_cast<unsigned char>(byte);
    for (bits += 8; bits >= 6; bits -= 6) text += kDigits[pending >> (bits - 6) & 0x3F];
  }
  if (bits != 0) text += kDigits[pending << (6 - bits) & 0x3F];
  return text;
}

std::optional<SafetensorsChecksums> parse_checksum_text(std::string_view text) {
  std::string bytes;
  bytes.reserve(text.size() / 4 * 3 + 3);
  uint32_t pending = 0;
  unsigned bits = 0;
  for (const char digit : text) {
    const uint8_t value = kValues[static_cast<unsigned char>(digit)];
    if (value > 0x3F) return std::nullopt;
    pending = pending << 6 | value;
    bits += 6;
    if (bits >= 8) {
      bits -= 8;
      bytes += static_cast<char>(pending >> bits);
    }
  }
  const uint64_t words = bytes.size() / sizeof(uint32_t);
  const bool whole = words != 0 && checksum_text_bytes(words - 1) == text.size();
  if (!whole || (pending & ((1u << bits) - 1)) != 0) return std::nullopt;
  SafetensorsChecksums checksums;
  checksums.blocks.resize(words - 1);
  std::memcpy(&checksums.head, bytes.data(), sizeof checksums.head);
  if (words > 1) {
    std::memcpy(checksums.blocks.data(), bytes.data() + sizeof checksums.head, (words - 1) * sizeof(uint32_t));
  }
  return checksums;
}

uint32_t head_checksum(std::string_view head, uint64_t text_at, uint64_t text_bytes) {
  const std::string zeros(text_bytes, '0');
  uint32_t crc = crc32(0, head.data(), text_at);
  crc = crc32(crc, zeros.data(), zeros.size());
  return crc32(crc, head.data() + text_at + text_bytes, head.size() - text_at - text_bytes);
}

}  // namespace vescale_ckpt
