// The checksums that we keep in a safetensors header: of the header itself, and of the tensors by blocks. As text,
// because that is what `__metadata__` can hold; its length depends on the layout alone, so that room is known before
// any byte was written. Exact form: docs/format.md.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/memory.h"
#include "format/checksum_table.h"

namespace vescale_ckpt::hf {

// Where our data begin, behind a multiple of kBlock: as torch's CPU tensors lie behind a page, so that direct I/O needs
// no copy.
inline constexpr uint64_t kSafetensorsDataAt = 64;
// Spaces that end our headers at least. Others pad to a multiple of eight: a header that another tool has written anew,
// with our metadata but other data, ends in fewer.
inline constexpr uint64_t kSafetensorsLeastPadding = 8;

struct SafetensorsChecksums {
  uint32_t head = 0;             // CRC-32 of length and header, with zeros for this checksum's own digits
  std::vector<uint32_t> blocks;  // tensors in the order of their bytes: a block for each cell that one touches
};

uint64_t checksum_text_bytes(uint64_t blocks);
std::string checksum_text(const SafetensorsChecksums& checksums);
// nullopt for what is not such a text.
std::optional<SafetensorsChecksums> parse_checksum_text(std::string_view text);

// SafetensorsChecksums::head of the file's bytes before its data, where the checksums' text starts at text_at.
uint32_t head_checksum(std::string_view head, uint64_t text_at);

}  // namespace vescale_ckpt::hf
