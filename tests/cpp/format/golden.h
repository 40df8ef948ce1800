// Records as torch.save writes them; data/make_golden.py made them.
#pragma once

#include <algorithm>
#include <span>
#include <string>
#include <string_view>

#include "format/archive.h"
#include "scratch.h"

namespace vescale_ckpt::format {

inline std::string golden(std::string_view name) {
  std::string bytes = read_file(std::string(VESCALE_CKPT_TEST_DATA) + "/" + std::string(name) + ".bin");
  EXPECT_FALSE(bytes.empty()) << "no golden record " << name;
  return bytes;
}

inline std::span<const std::byte> view(std::string_view bytes) {
  return {reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()};
}

// The body of the entry of a sound archive whose name ends in `suffix`.
inline std::span<const std::byte> body_of(std::span<const std::byte> archive, std::string_view suffix) {
  const Directory directory = find_directory(archive, archive.size()).value();
  const auto entries = parse_directory(archive.subspan(directory.offset, directory.size), directory).value();
  const auto entry = std::ranges::find_if(entries, [&](const auto& one) { return one.name.ends_with(suffix); });
  return archive.subspan(body_offset(archive.subspan(entry->header_offset), *entry), entry->size);
}

}  // namespace vescale_ckpt::format
