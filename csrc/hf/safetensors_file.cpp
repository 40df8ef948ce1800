#include "hf/safetensors_file.h"

#include <algorithm>
#include <span>
#include <utility>

#include "base/crc32.h"
#include "base/error.h"
#include "format/torch_record.h"
#include "io/transfer.h"

namespace vescale_ckpt::hf {
namespace {

[[noreturn]] void replaced(const std::string& path) {
  throw Error::corrupt("file " + path +
                           " is not the one that this load was planned on: it was replaced meanwhile, or "
                           "ranks see different files",
                       path, 0);
}

// Makes of an item that names a record and the CRC-32 of a head one of that tensor in `file`, which must outlive it. A
// record may be a range of a tensor's elements (an index of its first dimension): the item becomes a box of the tensor.
void complete(read::ReadItem& item, const SafetensorsFile& file, const std::string& path) {
  if (item.crc != int64_t{file.head_crc}) replaced(path);
  item.bare = true;
  item.crc = read::kUnknownCrc;
  if (item.record_length == 0) return;
  const auto tensors = file.header.tensors();
  const auto found = std::ranges::lower_bound(tensors, item.record_offset + item.record_length, {},
                                              &SafetensorsHeader::Tensor::end);  // empty ones have no end of their own
  if (found == tensors.end() || found->begin > item.record_offset ||
      (item.record_offset - found->begin) % item.record_length != 0 ||
      (found->end - found->begin) % item.record_length != 0 ||
      format::tensor_bytes(format::dtypes()[item.dtype], item.chunk_sizes) != item.record_length) {
    throw Error::invalid("file " + path + " has no such tensor at offset " + std::to_string(item.record_offset));
  }
  item.blocks = file.header.blocks(*found);
  if (found->end - found->begin == item.record_length) return;
  item.box = item.box.in_larger(item.record_offset - found->begin);
  item.record_offset = found->begin;
  item.record_length = found->end - found->begin;
}

// Calls `work(item)` for each item. What it throws becomes an Error with the item's row.
template <typename Work>
void for_each_row(std::vector<read::ReadItem>& items, const Work& work) {
  for (size_t row = 0; row < items.size(); ++row) {
    try {
      work(items[row]);
    } catch (const Error& error) {
      throw error.of_item(static_cast<int64_t>(row));
    }
  }
}

// Length and header.
std::string read_head(io::File& file) {
  std::string head(std::min(file.size(), kSafetensorsLengthBytes), '\0');
  io::read_exactly(file, 0, std::as_writable_bytes(std::span(head)));
  const size_t had = head.size();
  head.resize(SafetensorsHeader::head_bytes(head, file.size(), file.path()));
  io::read_exactly(file, had, std::as_writable_bytes(std::span(head)).subspan(had));
  return head;
}

}  // namespace

std::shared_ptr<SafetensorsFile> SafetensorsFile::open(const std::string& path, const io::EngineOptions& options,
                                                       bool verify) {
  auto opened = std::make_shared<SafetensorsFile>();
  opened->file = io::File::open(path, options.widest, options.read_cached);
  const std::string head = read_head(*opened->file);
  opened->header = SafetensorsHeader::parse(head, opened->file->size(), path, verify);
  opened->head_crc = crc32(0, head.data(), head.size());
  return opened;
}

SafetensorsReads::SafetensorsReads(std::shared_ptr<const SafetensorsFile> file, bool verify,
                                   const io::EngineOptions& options)
    : verify_(verify), options_(options) {
  const std::string path = file->file->path();
  known_.emplace(path, std::move(file));
}

// Opens a file and makes sure that it begins as it did when it was opened first.
std::shared_ptr<io::File> SafetensorsReads::open(const std::string& path) {
  {
    const std::lock_guard lock(mutex_);
    if (const auto known = known_.find(path); known != known_.end() && known->second->file) return known->second->file;
  }
  std::shared_ptr<io::File> file = io::File::open(path, options_.widest, options_.read_cached);
  const std::string head = read_head(*file);
  const uint32_t crc = crc32(0, head.data(), head.size());
  const std::lock_guard lock(mutex_);
  if (const auto known = known_.find(path); known != known_.end()) {
    if (known->second->head_crc != crc) replaced(path);
    return file;
  }
  auto header = SafetensorsHeader::parse(head, file->size(), path, verify_);
  known_.emplace(path, std::make_shared<SafetensorsFile>(nullptr, std::move(header), crc));
  return file;
}

// Completes all rows. Returns what gives their files: few stay open from here on, the others are opened again.
read::OpenFile SafetensorsReads::prepare(std::span<const std::string> paths, std::vector<read::ReadItem>& items) {
  constexpr size_t kMostHeld = 64;
  std::map<uint32_t, std::shared_ptr<io::File>> held;
  for_each_row(items, [&](read::ReadItem& item) {
    if (item.file >= paths.size()) throw Error::invalid("no such file in the table");
    const std::string& path = paths[item.file];
    if (const auto [entry, is_new] = held.try_emplace(item.file); is_new) {
      std::shared_ptr<io::File> file = open(path);
      if (held.size() <= kMostHeld) entry->second = std::move(file);
    }
    const std::lock_guard lock(mutex_);
    complete(item, *known_.at(path), path);
  });
  return [this, paths, held = std::move(held)](uint32_t number) {
    const auto& file = held.at(number);
    return file ? file : open(paths[number]);
  };
}

std::unique_ptr<read::ReadReport> SafetensorsReads::read(std::span<const std::string> paths,
                                                         std::span<const int64_t> table,
                                                         std::span<const int64_t> devices, read::DeviceSink* sink) {
  std::vector<read::ReadItem> items = read::parse_read_table(table, devices);
  const read::OpenFile open = prepare(paths, items);
  return read::read_tensors(paths, items, verify_, options_, sink, open);
}

std::unique_ptr<read::ReadReport> SafetensorsReads::check(std::span<const std::string> paths,
                                                          std::span<const int64_t> table) {
  std::vector<read::ReadItem> items = read::parse_check_table(table);
  return read::check_tensors(paths, items, options_, prepare(paths, items));
}

}  // namespace vescale_ckpt::hf
