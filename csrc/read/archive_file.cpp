#include "read/archive_file.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <span>
#include <vector>

#include "base/crc32.h"
#include "base/error.h"
#include "format/archive.h"
#include "format/pickle_check.h"
#include "io/transfer.h"

namespace vescale_ckpt::read {
namespace {

constexpr uint64_t kPiece = 1 << 20;
constexpr uint64_t kTail = 2048;       // the last bytes, which have the end records
constexpr uint64_t kLocalHeader = 30;  // length without the name
constexpr uint64_t kDescriptor = 24;   // length with sizes of 64 bits
constexpr uint16_t kHasDescriptor = 0x0008;

uint32_t crc_of(io::File& file, uint64_t offset, uint64_t length) {
  std::vector<std::byte> piece(std::min(kPiece, length));
  uint32_t crc = 0;
  for (uint64_t at = 0; at < length;) {
    const std::span<std::byte> next = std::span(piece).first(std::min(kPiece, length - at));
    io::read_exactly(file, offset + at, next);
    crc = crc32(crc, next.data(), next.size());
    at += next.size();
  }
  return crc;
}

struct Contents {
  format::Directory directory;
  std::vector<format::ArchiveEntry> entries;
};

// Returns nullopt if the directory is damaged, or has more than `most` bytes.
std::optional<Contents> contents_of(io::File& file, uint64_t offset, uint64_t length, uint64_t most) {
  std::vector<std::byte> tail(std::min(kTail, length));
  io::read_exactly(file, offset + length - tail.size(), tail);
  const auto directory = format::find_directory(tail, length);
  if (!directory || directory->size > most) return std::nullopt;
  std::vector<std::byte> bytes(directory->size);
  io::read_exactly(file, offset + directory->offset, bytes);
  auto entries = format::parse_directory(bytes, *directory);
  if (!entries) return std::nullopt;
  return Contents{*directory, std::move(*entries)};
}

// Returns where the entry's body is in the archive; 0 if its local header is not where the directory says, or the body
// leaves the archive.
uint64_t body_of(io::File& file, uint64_t offset, uint64_t length, const format::Directory& directory,
                 const format::ArchiveEntry& entry) {
  std::vector<std::byte> header(kLocalHeader + entry.name.size());
  if (header.size() > length - entry.header_offset) return 0;
  io::read_exactly(file, offset + entry.header_offset, header);
  const uint64_t body = format::body_offset(header, entry);
  if (body == 0 || body > directory.offset || entry.size > directory.offset - body) return 0;
  const std::string_view name(reinterpret_cast<const char*>(header.data()) + kLocalHeader, entry.name.size());
  return name == entry.name ? body : 0;
}

class Checker {
 public:
  Checker(io::File& file, uint64_t offset, uint64_t length) : file_(file), offset_(offset), length_(length) {
    found_.offset = offset;
  }

  ArchiveCheck run(int64_t crc) {
    if (offset_ > file_.size() || length_ > file_.size() - offset_) {
      wrong("file " + file_.path() + " is truncated: it has " + std::to_string(file_.size()) +
            " bytes, the record at offset " + std::to_string(offset_) + " needs " + std::to_string(length_));
      return found_;
    }
    try {
      check(crc);
    } catch (const Error& error) {
      if (error.kind == Error::Kind::io) throw;  // the file may be sound
      wrong(error.what(), error.offset);
    }
    return found_;
  }

 private:
  void wrong(std::string text, uint64_t offset) {
    found_.wrong = std::move(text);
    found_.offset = offset;
  }
  void wrong(std::string text) { wrong(std::move(text), offset_); }

  void check(int64_t crc) {
    if (!check_entries()) return;
    if (crc >= 0 && crc_of(file_, offset_, length_) != static_cast<uint64_t>(crc)) {
      wrong("it is not the object that was saved");
    }
  }

  bool check_entries() {
    const auto contents = contents_of(file_, offset_, length_, UINT64_MAX);
    if (!contents) {
      wrong("the archive's directory is damaged");
      return false;
    }
    return std::ranges::all_of(
        contents->entries, [&](const format::ArchiveEntry& entry) { return check_entry(contents->directory, entry); });
  }

  bool check_entry(const format::Directory& directory, const format::ArchiveEntry& entry) {
    const uint64_t body = body_of(file_, offset_, length_, directory, entry);
    if (body == 0) {
      wrong("the header of " + entry.name + " is damaged", offset_ + entry.header_offset);
      return false;
    }
    check_descriptor(directory, entry, body);
    if (entry.name.ends_with("data.pkl")) {
      std::vector<std::byte> pickle(entry.size);
      io::read_exactly(file_, offset_ + body, pickle);
      if (const std::string reason = format::check_pickle(pickle, true); !reason.empty()) {
        wrong("the pickle " + entry.name + " is not sound: " + reason, offset_ + body);
        return false;
      }
    }
    if (entry.crc == 0) {  // an empty body also has 0
      const bool sure = entry.size == 0 || crc_of(file_, offset_ + body, entry.size) == 0;
      if (!sure) found_.unverified_bytes += entry.size;
      return true;
    }
    if (crc_of(file_, offset_ + body, entry.size) == entry.crc) return true;
    wrong("the checksum of " + entry.name + " does not match", offset_ + body);
    return false;
  }

  // Checks the descriptor behind a body, which repeats fields of the directory. Readers use the directory.
  void check_descriptor(const format::Directory& directory, const format::ArchiveEntry& entry, uint64_t body) {
    std::array<std::byte, kLocalHeader> header;
    io::read_exactly(file_, offset_ + entry.header_offset, header);
    if ((format::number_at<uint16_t>(header, 6) & kHasDescriptor) == 0) return;
    const uint64_t end = body + entry.size;
    std::vector<std::byte> found(std::min(kDescriptor, directory.offset - end));
    io::read_exactly(file_, offset_ + end, found);
    found.resize(kDescriptor);
    const bool begins =
        std::memcmp(found.data(), "PK\7\10", 4) == 0 && format::number_at<uint32_t>(found, 4) == entry.crc;
    const bool narrow =
        format::number_at<uint32_t>(found, 8) == entry.size && format::number_at<uint32_t>(found, 12) == entry.size;
    const bool wide =
        format::number_at<uint64_t>(found, 8) == entry.size && format::number_at<uint64_t>(found, 16) == entry.size;
    if (!begins || !(narrow || wide)) {
      found_.harmless = "the data descriptor of " + entry.name + " is not that of its directory";
    }
  }

  io::File& file_;
  const uint64_t offset_, length_;
  ArchiveCheck found_;
};

}  // namespace

ArchiveCheck check_archive_in(io::File& file, uint64_t offset, uint64_t length, int64_t crc) {
  return Checker(file, offset, length).run(crc);
}

std::optional<TensorBody> find_tensor(io::File& file, uint64_t offset, uint64_t length,
                                      const format::TensorRecord& framing) {
  constexpr uint64_t kMostDirectory = 1 << 20, kMostEntry = 4096;
  const auto contents = contents_of(file, offset, length, kMostDirectory);
  if (!contents) return std::nullopt;
  const format::ArchiveEntry* body = nullptr;
  bool pickle_matches = false, little = true;
  for (const format::ArchiveEntry& entry : contents->entries) {
    if (entry.name.ends_with("/data/0")) body = &entry;
    const bool is_pickle = entry.name.ends_with("/data.pkl"), is_order = entry.name.ends_with("/byteorder");
    if (!is_pickle && !is_order) continue;
    const uint64_t at = entry.size > kMostEntry ? 0 : body_of(file, offset, length, contents->directory, entry);
    if (at == 0) return std::nullopt;
    std::string text(entry.size, '\0');
    io::read_exactly(file, offset + at, std::as_writable_bytes(std::span(text)));
    if (is_pickle) pickle_matches = text == framing.pickle();
    if (is_order) little = text == "little";
  }
  if (body == nullptr || !pickle_matches || !little || body->size != framing.body_bytes()) return std::nullopt;
  const uint64_t at = body_of(file, offset, length, contents->directory, *body);
  return at == 0 ? std::nullopt : std::optional(TensorBody{offset + at, body->crc});
}

}  // namespace vescale_ckpt::read
