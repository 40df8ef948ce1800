// The zip dialect of torch.save: stored entries, bodies on 64-byte boundaries, data descriptors, zip64 where needed.
// docs/format.md has every field. Little-endian hosts only, as torch.save's own `byteorder` entry says of our files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace vescale_ckpt::format {

struct ArchiveEntry {
  std::string name;
  uint64_t header_offset = 0;  // of the local header, from the start of the archive
  uint64_t size = 0;           // of the body, bytes
  uint32_t crc = 0;
  size_t crc_field = 0;  // where ArchiveWriter put the two copies of `crc`, from the start of its bytes()
  size_t crc_field_central = 0;
};

// Writes an archive in memory; bodies may be left out and counted only.
class ArchiveWriter {
 public:
  explicit ArchiveWriter(std::string root = "archive/") : root_(std::move(root)) {}  // before every name
  void add(std::string_view name, std::string_view body);
  // An entry whose body is written elsewhere: header now, `size` bytes skipped, descriptor with `crc` after them.
  // Names have up to 65535 bytes.
  void begin(std::string_view name, uint64_t size);
  void end(uint32_t crc);
  void finish();  // central directory and ends

  const std::string& bytes() const { return bytes_; }  // all but the skipped bodies
  uint64_t position() const { return position_; }      // in the archive, skipped bodies counted
  const std::vector<ArchiveEntry>& entries() const { return entries_; }
  void reserve(size_t bytes) { bytes_.reserve(bytes); }
  // What was added since the last call, and lets go of it. Where the copies of a checksum lie is not known any more.
  std::string take() { return std::exchange(bytes_, {}); }

 private:
  void append(std::string_view text);
  template <typename Integer>
  void integer(Integer value);
  const std::string root_;
  std::string bytes_;
  uint64_t position_ = 0;
  std::vector<ArchiveEntry> entries_;
};

// How the end of an archive is found and read. None of these trusts its input.
struct Directory {
  uint64_t offset = 0;  // of the central directory, from the start of the archive
  uint64_t size = 0;    // bytes
  uint64_t entries = 0;
};
// `tail`: the last bytes of an archive of `archive_size` bytes. nullopt: not an archive, or its end is damaged.
std::optional<Directory> find_directory(std::span<const std::byte> tail, uint64_t archive_size);
// `bytes`: exactly the central directory. nullopt if damaged or not stored plainly (compressed, encrypted).
std::optional<std::vector<ArchiveEntry>> parse_directory(std::span<const std::byte> bytes, const Directory& directory);
// Where the body of an entry starts, from the bytes at its local header (30 suffice); 0 if that is not the header.
uint64_t body_offset(std::span<const std::byte> header, const ArchiveEntry& entry);

// Checks that every entry is where the directory says, its pickle (check_pickle), and with `checksums` every checksum.
// An empty string if all is well, else what is wrong.
std::string check_archive(std::span<const std::byte> archive, bool checksums = true);
// False if some entry was written without its checksum, which torch can be told to leave out.
bool has_checksums(std::span<const std::byte> archive);
// The body of the first entry whose name ends in `suffix`; nullopt if there is none or the archive is damaged.
std::optional<std::span<const std::byte>> find_body(std::span<const std::byte> archive, std::string_view suffix);
// The body of `data.pkl` of an archive that holds one pickle and no storages: nullopt for any other, or a damaged one.
std::optional<std::span<const std::byte>> find_pickle(std::span<const std::byte> archive);

}  // namespace vescale_ckpt::format
