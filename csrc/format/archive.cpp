#include "format/archive.h"

#include <algorithm>
#include <cstring>

#include "base/crc32.h"
#include "format/pickle_check.h"

namespace vescale_ckpt::format {
namespace {

constexpr uint64_t kAlignment = 64;         // bodies start at multiples of it in the archive
constexpr uint32_t kClamped = 0xFFFFFFFFu;  // the zip64 field has the value
constexpr uint16_t kFlagsUtf8 = 0x0800;
constexpr uint16_t kFlagsDescriptor = 0x0008;
constexpr uint32_t kFolderAttribute = 0x10;  // an attribute of MS-DOS

constexpr size_t kHeaderBytes = 30;
constexpr size_t kCentralBytes = 46;
constexpr size_t kEndBytes = 22;
constexpr size_t kLocatorBytes = 20;
constexpr size_t kEnd64Bytes = 56;

bool needs_zip64(const ArchiveEntry& entry) {
  return entry.size >= kClamped || entry.header_offset >= kClamped;
}
uint32_t clamp(uint64_t value) {
  return value >= kClamped ? kClamped : static_cast<uint32_t>(value);
}

bool starts_with(std::span<const std::byte> bytes, const char (&signature)[5]) {
  return bytes.size() >= 4 && std::memcmp(bytes.data(), signature, 4) == 0;
}

}  // namespace

void ArchiveWriter::append(std::string_view text) {
  bytes_.append(text);
  position_ += text.size();
}

template <typename Integer>
void ArchiveWriter::integer(Integer value) {
  char raw[sizeof value];
  std::memcpy(raw, &value, sizeof value);
  append({raw, sizeof value});
}

void ArchiveWriter::begin(std::string_view name, uint64_t size) {
  ArchiveEntry entry;
  entry.name = "archive/" + std::string(name);
  entry.header_offset = position_;
  entry.size = size;
  const uint16_t zip64 = size >= kClamped ? 20 : position_ >= kClamped ? 12 : 0;
  const uint64_t unpadded = position_ + kHeaderBytes + entry.name.size() + zip64 + 4;
  const auto padding = static_cast<uint16_t>((kAlignment - unpadded % kAlignment) % kAlignment);

  append("PK\3\4");
  integer<uint16_t>(0);  // version
  integer<uint16_t>(size == 0 ? kFlagsUtf8 : kFlagsUtf8 | kFlagsDescriptor);
  integer<uint16_t>(0);  // stored
  integer<uint32_t>(0);  // time, date
  integer<uint32_t>(0);  // the descriptor has the crc
  integer<uint32_t>(0);  // the descriptor has the sizes
  integer<uint32_t>(0);
  integer(static_cast<uint16_t>(entry.name.size()));
  integer(static_cast<uint16_t>(zip64 + 4 + padding));
  append(entry.name);
  if (size >= kClamped) {
    integer<uint16_t>(1);
    integer<uint16_t>(16);
    integer<uint64_t>(size);
    integer<uint64_t>(0);
  } else if (entry.header_offset >= kClamped) {
    integer<uint16_t>(1);
    integer<uint16_t>(8);
    integer<uint64_t>(entry.header_offset);
  }
  append("FB");
  integer(padding);
  append(std::string(padding, 'Z'));
  position_ += size;
  entries_.push_back(std::move(entry));
}

void ArchiveWriter::end(uint32_t crc) {
  ArchiveEntry& entry = entries_.back();
  entry.crc = crc;
  if (entry.size == 0) return;
  append("PK\7\10");
  entry.crc_field = bytes_.size();
  integer(crc);
  if (needs_zip64(entry)) {
    integer(entry.size);
    integer(entry.size);
  } else {
    integer(static_cast<uint32_t>(entry.size));
    integer(static_cast<uint32_t>(entry.size));
  }
}

void ArchiveWriter::add(std::string_view name, std::string_view body) {
  begin(name, body.size());
  bytes_.append(body);  // begin() has counted it
  end(crc32(0, body.data(), body.size()));
}

void ArchiveWriter::finish() {
  const uint64_t directory = position_;
  for (ArchiveEntry& entry : entries_) {
    const auto zip64 =
        static_cast<uint16_t>((entry.size >= kClamped ? 16 : 0) + (entry.header_offset >= kClamped ? 8 : 0));
    append("PK\1\2");
    integer<uint32_t>(0);  // versions
    integer<uint16_t>(entry.size == 0 ? kFlagsUtf8 : kFlagsUtf8 | kFlagsDescriptor);
    integer<uint16_t>(0);
    integer<uint32_t>(0);
    entry.crc_field_central = bytes_.size();
    integer(entry.crc);
    integer(clamp(entry.size));
    integer(clamp(entry.size));
    integer(static_cast<uint16_t>(entry.name.size()));
    integer(static_cast<uint16_t>(zip64 == 0 ? 0 : zip64 + 4));
    integer<uint16_t>(0);  // comment
    integer<uint16_t>(0);  // disk
    integer<uint16_t>(0);  // attributes
    integer<uint32_t>(0);
    integer(clamp(entry.header_offset));
    append(entry.name);
    if (zip64 != 0) {
      integer<uint16_t>(1);
      integer(zip64);
      if (entry.size >= kClamped) {
        integer(entry.size);
        integer(entry.size);
      }
      if (entry.header_offset >= kClamped) integer(entry.header_offset);
    }
  }
  const uint64_t end64 = position_;
  const uint64_t count = entries_.size();
  append("PK\6\6");
  integer<uint64_t>(kEnd64Bytes - 12);
  integer<uint16_t>(0x031E);
  integer<uint16_t>(45);
  integer<uint64_t>(0);  // disks
  integer(count);
  integer(count);
  integer(end64 - directory);
  integer(directory);
  append("PK\6\7");
  integer<uint32_t>(0);
  integer(end64);
  integer<uint32_t>(1);
  append("PK\5\6");
  integer<uint32_t>(0);  // disks
  integer(static_cast<uint16_t>(count));
  integer(static_cast<uint16_t>(count));
  integer(static_cast<uint32_t>(end64 - directory));
  integer(clamp(directory));
  integer<uint16_t>(0);  // comment
}

std::optional<Directory> find_directory(std::span<const std::byte> tail, uint64_t archive_size) {
  if (tail.size() < kEndBytes || tail.size() > archive_size) return std::nullopt;
  // torch writes no comment, so the end record comes last.
  const auto end = tail.last(kEndBytes);
  if (!starts_with(end, "PK\5\6") || number_at<uint16_t>(end, 20) != 0) return std::nullopt;
  Directory directory{number_at<uint32_t>(end, 16), number_at<uint32_t>(end, 12), number_at<uint16_t>(end, 10)};
  uint64_t limit = archive_size - kEndBytes;
  if (tail.size() >= kEndBytes + kLocatorBytes + kEnd64Bytes) {
    const auto locator = tail.last(kEndBytes + kLocatorBytes).first(kLocatorBytes);
    const auto end64 = tail.last(kEndBytes + kLocatorBytes + kEnd64Bytes).first(kEnd64Bytes);
    if (starts_with(locator, "PK\6\7")) {
      if (!starts_with(end64, "PK\6\6")) return std::nullopt;
      limit -= kLocatorBytes + kEnd64Bytes;
      if (number_at<uint64_t>(locator, 8) != limit) return std::nullopt;
      directory = {number_at<uint64_t>(end64, 48), number_at<uint64_t>(end64, 40), number_at<uint64_t>(end64, 32)};
    }
  }
  if (directory.size > limit || directory.offset != limit - directory.size) return std::nullopt;
  if (directory.entries > directory.size / kCentralBytes) return std::nullopt;
  return directory;
}

std::optional<std::vector<ArchiveEntry>> parse_directory(std::span<const std::byte> bytes, const Directory& directory) {
  std::vector<ArchiveEntry> entries;
  entries.reserve(directory.entries);
  for (uint64_t index = 0; index < directory.entries; ++index) {
    if (bytes.size() < kCentralBytes || !starts_with(bytes, "PK\1\2")) return std::nullopt;
    const auto flags = number_at<uint16_t>(bytes, 8), method = number_at<uint16_t>(bytes, 10);
    const size_t name = number_at<uint16_t>(bytes, 28), extra = number_at<uint16_t>(bytes, 30),
                 comment = number_at<uint16_t>(bytes, 32);
    if (bytes.size() < kCentralBytes + name + extra + comment) return std::nullopt;
    if (method != 0 || (flags & 1) != 0) return std::nullopt;
    // torch's reader takes such an entry for a folder, reads nothing, and leaves the tensor's memory uninitialized.
    if ((number_at<uint32_t>(bytes, 38) & kFolderAttribute) != 0) return std::nullopt;
    ArchiveEntry entry;
    entry.name.assign(reinterpret_cast<const char*>(bytes.data()) + kCentralBytes, name);
    entry.crc = number_at<uint32_t>(bytes, 16);
    entry.size = number_at<uint32_t>(bytes, 24);
    entry.header_offset = number_at<uint32_t>(bytes, 42);
    if (number_at<uint32_t>(bytes, 20) != number_at<uint32_t>(bytes, 24))
      return std::nullopt;  // a stored entry has equal sizes
    for (auto field = bytes.subspan(kCentralBytes + name, extra); field.size() >= 4;) {
      const size_t length = number_at<uint16_t>(field, 2);
      if (length > field.size() - 4) return std::nullopt;
      if (number_at<uint16_t>(field, 0) == 1) {
        auto values = field.subspan(4, length);
        const auto next = [&values](uint64_t& value) {
          if (values.size() < 8) return false;
          value = number_at<uint64_t>(values, 0);
          values = values.subspan(8);
          return true;
        };
        uint64_t stored = 0;
        if (entry.size == kClamped && (!next(entry.size) || !next(stored) || stored != entry.size)) return std::nullopt;
        if (entry.header_offset == kClamped && !next(entry.header_offset)) return std::nullopt;
      }
      field = field.subspan(4 + length);
    }
    if (entry.header_offset > directory.offset || entry.size > directory.offset - entry.header_offset)
      return std::nullopt;
    entries.push_back(std::move(entry));
    bytes = bytes.subspan(kCentralBytes + name + extra + comment);
  }
  if (!bytes.empty()) return std::nullopt;
  return entries;
}

uint64_t body_offset(std::span<const std::byte> header, const ArchiveEntry& entry) {
  if (header.size() < kHeaderBytes || !starts_with(header, "PK\3\4")) return 0;
  if (number_at<uint16_t>(header, 26) != entry.name.size()) return 0;
  return entry.header_offset + kHeaderBytes + entry.name.size() + number_at<uint16_t>(header, 28);
}

namespace {

struct OpenArchive {
  Directory directory;
  std::vector<ArchiveEntry> entries;
};

std::optional<OpenArchive> open_archive(std::span<const std::byte> archive) {
  const auto directory = find_directory(archive, archive.size());
  if (!directory) return std::nullopt;
  auto entries = parse_directory(archive.subspan(directory->offset, directory->size), *directory);
  if (!entries) return std::nullopt;
  return OpenArchive{*directory, std::move(*entries)};
}

std::optional<std::span<const std::byte>> body_of(std::span<const std::byte> archive, const OpenArchive& open,
                                                  const ArchiveEntry& entry) {
  const uint64_t start = body_offset(archive.subspan(entry.header_offset), entry);
  if (start == 0 || start > open.directory.offset || entry.size > open.directory.offset - start) return std::nullopt;
  if (std::memcmp(archive.data() + entry.header_offset + kHeaderBytes, entry.name.data(), entry.name.size()) != 0) {
    return std::nullopt;
  }
  return archive.subspan(start, entry.size);
}

}  // namespace

std::string check_archive(std::span<const std::byte> archive, bool checksums) {
  const auto open = open_archive(archive);
  if (!open) return "the archive's directory is damaged";
  for (const ArchiveEntry& entry : open->entries) {
    const auto body = body_of(archive, *open, entry);
    if (!body) return "the header of " + entry.name + " is damaged";
    if (std::string_view(entry.name).ends_with("data.pkl")) {
      const std::string wrong = check_pickle(*body, true);
      if (!wrong.empty()) return "the pickle " + entry.name + " is not sound: " + wrong;
    }
    if (!checksums || entry.crc == 0) continue;  // torch.serialization.set_crc32_options(False) leaves out checksums
    if (crc32(0, body->data(), body->size()) != entry.crc) return "the checksum of " + entry.name + " does not match";
  }
  return {};
}

bool has_checksums(std::span<const std::byte> archive) {
  const auto open = open_archive(archive);
  return open && std::none_of(open->entries.begin(), open->entries.end(),
                              [](const ArchiveEntry& entry) { return entry.size != 0 && entry.crc == 0; });
}

std::optional<std::span<const std::byte>> find_pickle(std::span<const std::byte> archive) {
  const auto open = open_archive(archive);
  if (!open || open->entries.empty()) return std::nullopt;
  // torch looks in the folder of the first entry. An archive in which another reader might look elsewhere is refused.
  const std::string& first = open->entries.front().name;
  if (!first.ends_with("/data.pkl") || first.find('/') != first.size() - std::strlen("/data.pkl")) return std::nullopt;
  const std::string_view folder = std::string_view(first).substr(0, first.find('/') + 1);
  for (const ArchiveEntry& entry : std::span(open->entries).subspan(1)) {
    const std::string_view name = entry.name;
    if (!name.starts_with(folder) || name.starts_with(std::string(folder) + "data")) return std::nullopt;
  }
  return body_of(archive, *open, open->entries.front());
}

}  // namespace vescale_ckpt::format
