#include "hf/safetensors_file.h"

#include <algorithm>
#include <span>
#include <unordered_map>
#include <utility>

#include "base/crc32.h"
#include "base/error.h"
#include "base/numbered_strings.h"
#include "format/torch_record.h"
#include "io/transfer.h"
#include "metadata/record_locations.h"
#include "state/inventory.h"

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

// The tensors of a header under these names, or all; null for a name that it has not.
std::vector<const SafetensorsHeader::Tensor*> wanted_tensors(const SafetensorsHeader& header,
                                                             const std::vector<std::string>* names) {
  std::vector<const SafetensorsHeader::Tensor*> wanted;
  if (names == nullptr) {
    for (const auto& tensor : header.tensors()) wanted.push_back(&tensor);
    return wanted;
  }
  std::unordered_map<std::string_view, const SafetensorsHeader::Tensor*> known;
  for (const auto& tensor : header.tensors()) known.emplace(tensor.name, &tensor);
  for (const std::string& name : *names) wanted.push_back(known[name]);
  return wanted;
}

// The shape, if torch and the tables of records can hold such a tensor.
std::optional<std::vector<int64_t>> usable_shape(const SafetensorsHeader& header,
                                                 const SafetensorsHeader::Tensor& tensor, uint64_t item_bytes) {
  std::vector<int64_t> shape;
  try {
    shape = header.torch_shape(tensor);
  } catch (const Error&) {
    return std::nullopt;
  }
  uint64_t least = item_bytes;  // as if no dimension were empty
  for (const int64_t size : shape) {
    const auto length = static_cast<uint64_t>(std::max<int64_t>(size, 1));
    if (__builtin_mul_overflow(least, length, &least) || least >= metadata::kFarthest) return std::nullopt;
  }
  return shape;
}

}  // namespace

std::optional<HeaderRows> header_rows(std::span<const std::shared_ptr<SafetensorsFile>> files,
                                      const std::optional<std::vector<std::vector<std::string>>>& keys) {
  HeaderRows rows;
  state::InventoryBuilder inventory;
  NumberedStrings seen;
  for (size_t number = 0; number < files.size(); ++number) {
    const SafetensorsHeader& header = files[number]->header;
    for (const SafetensorsHeader::Tensor* tensor : wanted_tensors(header, keys ? &keys->at(number) : nullptr)) {
      if (tensor == nullptr || !seen.add(tensor->name).second) return std::nullopt;
      const auto code = format::dtype_named(header.dtype(*tensor).torch);
      if (!code) return std::nullopt;
      const auto shape = usable_shape(header, *tensor, format::dtypes()[*code].item_bytes);
      if (!shape || shape->size() > state::kMostDims) return std::nullopt;
      const uint64_t bytes = tensor->end - tensor->begin;
      inventory.add(state::whole_tensor(tensor->name, *code, 0, bytes, *shape));
      rows.locations.insert(rows.locations.end(), {static_cast<int64_t>(number), static_cast<int64_t>(tensor->begin),
                                                   static_cast<int64_t>(bytes), int64_t{files[number]->head_crc}});
      rows.names.push_back(tensor->name);
      rows.dtypes.push_back(static_cast<char>(*code));
    }
  }
  for (const auto& file : files) {
    for (const auto& [alias, name] : file->header.metadata().value_or(SafetensorsHeader::Metadata())) {
      if (seen.find(name)) return std::nullopt;
    }
  }
  rows.inventory = inventory.pack();
  return rows;
}

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
