#include "hf/safetensors_checksums.h"

#include <array>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <span>

#include "base/crc32.h"

namespace vescale_ckpt::hf {
namespace {

// The head's checksum in hexadecimal, then those of the blocks in base64 without padding.
constexpr size_t kHeadDigits = 8;
constexpr std::string_view kHexDigits = "0123456789abcdef";
constexpr std::string_view kDigits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

constexpr std::array<uint8_t, 256> kValues = [] {
  std::array<uint8_t, 256> values{};
  values.fill(0xFF);
  for (size_t i = 0; i < kDigits.size(); ++i) values[static_cast<unsigned char>(kDigits[i])] = static_cast<uint8_t>(i);
  return values;
}();

}  // namespace

uint64_t checksum_text_bytes(uint64_t blocks) {
  return kHeadDigits + (blocks * sizeof(uint32_t) * 4 + 2) / 3;
}

std::string checksum_text(const SafetensorsChecksums& checksums) {
  char head[kHeadDigits + 1];
  std::snprintf(head, sizeof head, "%08x", checksums.head);
  std::string text(head, kHeadDigits);
  text.reserve(checksum_text_bytes(checksums.blocks.size()));
  uint32_t pending = 0;
  unsigned bits = 0;
  for (const std::byte byte : std::as_bytes(std::span(checksums.blocks))) {
    pending = pending << 8 | std::to_integer<uint32_t>(byte);
    for (bits += 8; bits >= 6;) {
      bits -= 6;
      text += kDigits[pending >> bits & 0x3F];
    }
  }
  if (bits != 0) text += kDigits[pending << (6 - bits) & 0x3F];
  return text;
}

std::optional<SafetensorsChecksums> parse_checksum_text(std::string_view text) {
  if (text.size() < kHeadDigits) return std::nullopt;
  SafetensorsChecksums checksums;
  for (const char digit : text.substr(0, kHeadDigits)) {
    const size_t value = kHexDigits.find(digit);
    if (value == kHexDigits.npos) return std::nullopt;
    checksums.head = checksums.head << 4 | static_cast<uint32_t>(value);
  }
  std::string bytes;
  bytes.reserve(text.size() / 4 * 3 + 3);
  uint32_t pending = 0;
  unsigned bits = 0;
  for (const char digit : text.substr(kHeadDigits)) {
    const uint8_t value = kValues[static_cast<unsigned char>(digit)];
    if (value > 0x3F) return std::nullopt;
    pending = pending << 6 | value;
    bits += 6;
    if (bits >= 8) {
      bits -= 8;
      bytes += static_cast<char>(pending >> bits);
    }
  }
  const uint64_t blocks = bytes.size() / sizeof(uint32_t);
  if (checksum_text_bytes(blocks) != text.size() || (pending & ((1u << bits) - 1)) != 0) return std::nullopt;
  checksums.blocks.resize(blocks);
  if (blocks != 0) std::memcpy(checksums.blocks.data(), bytes.data(), blocks * sizeof(uint32_t));
  return checksums;
}

uint32_t head_checksum(std::string_view head, uint64_t text_at) {
  const std::string zeros(kHeadDigits, '0');
  uint32_t crc = crc32(0, head.data(), text_at);
  crc = crc32(crc, zeros.data(), zeros.size());
  return crc32(crc, head.data() + text_at + kHeadDigits, head.size() - text_at - kHeadDigits);
}

}  // namespace vescale_ckpt::hf
