#include "hf/safetensors_reads.h"

#include <algorithm>
#include <utility>

#include "base/crc32.h"
#include "base/error.h"
#include "format/torch_record.h"
#include "read/table.h"

namespace vescale_ckpt::hf {
namespace {

[[noreturn]] void replaced(const std::string& path) {
  throw Error::corrupt("file " + path +
                           " is not the one that this load was planned on: it was replaced meanwhile, or "
                           "ranks see different files",
                       path, 0);
}

}  // namespace

// Opens a file and makes sure that it begins as it did when it was opened first.
std::shared_ptr<io::File> SafetensorsReads::open(const std::string& path) {
  std::shared_ptr<io::File> file = io::File::open(path, options_.widest, options_.read_cached);
  const std::string head = SafetensorsFile::read_head(*file);
  const uint32_t crc = crc32(0, head.data(), head.size());
  const std::lock_guard lock(mutex_);
  if (const auto known = known_.find(path); known != known_.end()) {
    if (known->second.head_crc != crc) replaced(path);
    return file;
  }
  Known known{SafetensorsHeader::parse(head, file->size(), path, verify_), crc, {}};
  known.crcs.resize(known.header.tensors().size());
  known_.emplace(path, std::move(known));
  return file;
}

// Makes of a row that names a record one of that tensor.
void SafetensorsReads::complete(read::ReadItem& item, const std::string& path) {
  const std::lock_guard lock(mutex_);
  Known& known = known_.at(path);
  if (item.crc != int64_t{known.head_crc}) replaced(path);
  item.bare = true;
  item.crc = read::kUnknownCrc;
  if (item.record_length == 0) return;
  const auto tensors = known.header.tensors();
  const auto found = std::ranges::lower_bound(tensors, item.record_offset + item.record_length, {},
                                              &SafetensorsHeader::Tensor::end);  // empty ones have no end of their own
  if (found == tensors.end() || found->begin != item.record_offset ||
      found->end != item.record_offset + item.record_length ||
      format::tensor_bytes(format::dtypes()[item.dtype], item.chunk_sizes) != item.record_length) {
    throw Error::invalid("file " + path + " has no such tensor at offset " + std::to_string(item.record_offset));
  }
  if (!known.header.has_checksums()) return;
  std::optional<uint32_t>& crc = known.crcs[static_cast<size_t>(found - tensors.begin())];
  if (!crc) crc = known.header.crc(*found);
  item.crc = *crc;
  item.blocks = known.header.blocks(*found);
}

// Completes all rows. Returns what gives their files: few stay open from here on, the others are opened again.
read::OpenFile SafetensorsReads::prepare(std::span<const std::string> paths, std::vector<read::ReadItem>& items) {
  constexpr size_t kMostHeld = 64;
  std::map<uint32_t, std::shared_ptr<io::File>> held;
  for (size_t row = 0; row < items.size(); ++row) {
    read::ReadItem& item = items[row];
    try {
      if (item.file >= paths.size()) throw Error::invalid("no such file in the table");
      if (const auto [entry, is_new] = held.try_emplace(item.file); is_new) {
        std::shared_ptr<io::File> file = open(paths[item.file]);
        if (held.size() <= kMostHeld) entry->second = std::move(file);
      }
      complete(item, paths[item.file]);
    } catch (const Error& error) {
      throw Error(error.kind, error.what(), error.path, error.offset, error.code, static_cast<int64_t>(row));
    }
  }
  return [this, paths, held = std::move(held)](uint32_t number) {
    const auto& file = held.at(number);
    return file ? file : open(paths[number]);
  };
}

std::unique_ptr<read::ReadReport> SafetensorsReads::read(std::span<const std::string> paths,
                                                         std::span<const int64_t> table) {
  std::vector<read::ReadItem> items = read::parse_read_table(table);
  const read::OpenFile open = prepare(paths, items);
  return read::read_tensors(paths, open, items, verify_, options_);
}

std::unique_ptr<read::ReadReport> SafetensorsReads::check(std::span<const std::string> paths,
                                                          std::span<const int64_t> table) {
  std::vector<read::ReadItem> items = read::parse_check_table(table);
  const read::OpenFile open = prepare(paths, items);
  return read::check_tensors(paths, open, items, options_);
}

}  // namespace vescale_ckpt::hf
