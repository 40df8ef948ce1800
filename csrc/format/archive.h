// Reads and writes the zip archives of torch.save: stored entries, bodies on 64-byte boundaries, data descriptors,
// zip64 where needed. docs/format.md has every field. Works on little-endian hosts only, as the `byteorder` entry says.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace vescale_ckpt::format {

struct ArchiveEntry {
  std::string name;
  uint64_t header_offset = 0;  // the local header, from the start of the archive
  uint64_t size = 0;           // bytes of the body
  uint32_t crc = 0;
  size_t crc_field = 0;  // places of the two copies of `crc` in ArchiveWriter's bytes()
  size_t crc_field_central = 0;
};

// Writes an archive of the folder "archive" in memory. Bodies may be left out and only counted.
class ArchiveWriter {
 public:
  void add(std::string_view name, std::string_view body);
  // Begins an entry whose body somebody else writes: writes the header and skips `size` bytes; `end` writes the
  // descriptor. Names have up to 65535 bytes.
  void begin(std::string_view name, uint64_t size);
  void end(uint32_t crc);
  void finish();  // central directory and ends

  const std::string& bytes() const { return bytes_; }  // all but the skipped bodies
  uint64_t position() const { return position_; }      // in the archive, skipped bodies counted
  const std::vector<ArchiveEntry>& entries() const { return entries_; }
  void reserve(size_t bytes) { bytes_.reserve(bytes); }

 private:
  void append(std::string_view text);
  template <typename Integer>
  void integer(Integer value);
  std::string bytes_;
  uint64_t position_ = 0;
  std::vector<ArchiveEntry> entries_;
};

// Returns a little-endian number of a record, which must have it.
template <typename Integer>
Integer number_at(std::span<const std::byte> bytes, size_t offset) {
  Integer value;
  std::memcpy(&value, bytes.data() + offset, sizeof value);
  return value;
}

// The central directory of an archive. The functions below do not trust their input.
struct Directory {
  uint64_t offset = 0;  // from the start of the archive
  uint64_t size = 0;    // bytes
  uint64_t entries = 0;
};
// Finds it. `tail`: the last bytes of an archive of `archive_size` bytes. nullopt: no archive, or its end is damaged.
std::optional<Directory> find_directory(std::span<const std::byte> tail, uint64_t archive_size);
// Reads it. `bytes`: exactly the central directory. nullopt if it is damaged, or an entry is compressed or encrypted.
std::optional<std::vector<ArchiveEntry>> parse_directory(std::span<const std::byte> bytes, const Directory& directory);
// Returns the start of an entry's body from the bytes at its local header (30 suffice); 0 if that is not the header.
uint64_t body_offset(std::span<const std::byte> header, const ArchiveEntry& entry);

// Checks that every entry is where the directory says, the pickle (check_pickle), and with `checksums` every checksum.
// Returns what is wrong; empty if the archive is sound.
std::string check_archive(std::span<const std::byte> archive, bool checksums = true);
// Whether all entries have checksums: torch has an option to leave them out.
bool has_checksums(std::span<const std::byte> archive);
// Returns the body of `data.pkl` of an archive with one pickle and no storages; nullopt for any other or a damaged one.
std::optional<std::span<const std::byte>> find_pickle(std::span<const std::byte> archive);

}  // namespace vescale_ckpt::format
