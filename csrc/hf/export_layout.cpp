#include "hf/export_layout.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>
#include <string_view>

#include "base/error.h"
#include "format/checksum_table.h"
#include "format/json.h"
#include "format/torch_record.h"
#include "io/box.h"
#include "write/placed_boxes.h"
#include "write/write_ranges.h"

namespace vescale_ckpt::hf {
namespace {

constexpr size_t kMostNamed = 10;  // keys in an error
constexpr size_t kLocalPlanRow = 4, kLocationRow = 2;

void expect_only_tensors(const metadata::Catalog& catalog) {
  std::string names;
  size_t objects = 0;
  for (const metadata::Catalog::Key& key : catalog.keys) {
    if (key.kind != state::ItemKind::object) continue;
    if (++objects <= kMostNamed) names += (objects == 1 ? "" : ", ") + std::string(catalog.name(key));
  }
  if (objects == 0) return;
  if (objects > kMostNamed) names += " and " + std::to_string(objects - kMostNamed) + " more";
  throw Error::invalid("safetensors files hold tensors only, and these are none: " + names);
}

SafetensorsLayout::Tensor tensor_of(const metadata::Catalog& catalog, const metadata::Catalog::Key& key) {
  const auto shape = catalog.shape(key);
  const std::optional<uint32_t> dtype = safetensors_dtype_named(format::dtypes()[key.dtype].name);
  if (!dtype) {
    throw Error::invalid(std::string(catalog.name(key)) + ": safetensors files have no " +
                         std::string(format::dtypes()[key.dtype].name) + ": save it as a view of another dtype");
  }
  return {std::string(catalog.name(key)), *dtype, {shape.begin(), shape.end()}};
}

// A row of what a rank holds, in the form of RankReads (share/routes.h).
void append_box(std::vector<int64_t>& rows, int64_t row, int64_t file, int64_t begin, uint32_t dtype,
                std::span<const int64_t> shape, std::span<const int64_t> offset, std::span<const int64_t> size) {
  constexpr int64_t kNoCrc = -1;
  const auto bytes = static_cast<int64_t>(format::tensor_bytes(format::dtypes()[dtype], shape));
  rows.insert(rows.end(), {row, file, begin, bytes, kNoCrc, dtype, static_cast<int64_t>(shape.size())});
  for (const auto list : {shape, offset, size}) rows.insert(rows.end(), list.begin(), list.end());
  rows.insert(rows.end(), shape.size(), 0);
}

// The keys of each file, by the tensors' sizes.
std::vector<std::vector<size_t>> shards_by_size(std::span<const uint64_t> bytes, uint64_t most_file_bytes) {
  std::vector<std::vector<size_t>> shards(1);
  uint64_t held = 0;
  for (size_t number = 0; number < bytes.size(); ++number) {
    if (!shards.back().empty() && (bytes[number] > most_file_bytes || held > most_file_bytes - bytes[number])) {
      shards.emplace_back();
      held = 0;
    }
    shards.back().push_back(number);
    held = bytes[number] > UINT64_MAX - held ? UINT64_MAX : held + bytes[number];
  }
  return shards;
}

// The keys of each file, by numbers that the caller gave to the tensors.
std::vector<std::vector<size_t>> shards_by_number(const metadata::Catalog& catalog,
                                                  std::span<const ExportLayout::FileNumber> numbers) {
  std::map<std::string_view, uint64_t> number_of;
  for (const ExportLayout::FileNumber& of : numbers) number_of.emplace(of.name, of.number);
  std::map<uint64_t, std::vector<size_t>> keys;  // {number of a file: keys}
  std::string without;
  size_t count = 0;
  for (size_t key = 0; key < catalog.keys.size(); ++key) {
    const auto found = number_of.find(catalog.name(catalog.keys[key]));
    if (found != number_of.end()) {
      keys[found->second].push_back(key);
    } else if (++count <= kMostNamed) {
      without += (count == 1 ? "" : ", ") + std::string(catalog.name(catalog.keys[key]));
    }
  }
  if (count > kMostNamed) without += " and " + std::to_string(count - kMostNamed) + " more";
  if (count != 0) throw Error::invalid("fqn_to_index_mapping has no file for " + without);
  std::vector<std::vector<size_t>> shards;
  for (auto& [number, of_file] : keys) shards.push_back(std::move(of_file));
  if (shards.empty()) shards.emplace_back();
  return shards;
}

}  // namespace

ExportLayout::ExportLayout(const metadata::Catalog& catalog, uint64_t most_file_bytes,
                           const SafetensorsHeader::Metadata& metadata, std::span<const Alias> aliases,
                           std::span<const FileNumber> numbers)
    : tensors_(catalog.keys.size()), rows_(catalog.ranks) {
  expect_only_tensors(catalog);
  std::vector<uint64_t> bytes(catalog.keys.size());
  for (size_t number = 0; number < catalog.keys.size(); ++number) {
    const metadata::Catalog::Key& key = catalog.keys[number];
    bytes[number] = format::tensor_bytes(format::dtypes()[key.dtype], catalog.shape(key));
    tensors_[number].name = catalog.name(key);
    if (__builtin_add_overflow(tensor_bytes_, bytes[number], &tensor_bytes_)) {
      throw Error::invalid("more bytes than can be counted");
    }
  }
  std::vector<std::vector<size_t>> shards =
      numbers.empty() ? shards_by_size(bytes, most_file_bytes) : shards_by_number(catalog, numbers);

  std::map<std::string_view, std::vector<const Alias*>> aliases_of;  // {stored tensor: its other names}
  std::map<std::string_view, size_t> stored;
  if (!aliases.empty()) {
    for (size_t number = 0; number < tensors_.size(); ++number) stored.emplace(tensors_[number].name, number);
  }
  for (const Alias& alias : aliases) {
    if (!stored.contains(alias.name)) aliases_of[alias.stored].push_back(&alias);
  }

  for (std::vector<size_t>& keys : shards) {
    SafetensorsHeader::Metadata texts = metadata;
    std::vector<SafetensorsLayout::Tensor> tensors;
    for (const size_t number : keys) {
      tensors.push_back(tensor_of(catalog, catalog.keys[number]));
      const auto found = aliases_of.find(tensors_[number].name);
      if (found == aliases_of.end()) continue;
      for (const Alias* alias : found->second) {
        if (std::ranges::find(texts, alias->name, [](const auto& text) { return text.first; }) == texts.end()) {
          texts.emplace_back(alias->name, alias->stored);
        }
      }
    }
    const auto file = static_cast<uint32_t>(files_.size());
    try {
      files_.push_back({SafetensorsLayout(std::move(tensors), std::move(texts)), std::move(keys)});
    } catch (const Error& error) {
      if (error.item < 0) throw;
      throw Error::invalid(tensors_[keys[static_cast<size_t>(error.item)]].name + ": " + error.what());
    }
    const SafetensorsLayout& layout = files_.back().layout;
    uint64_t at = layout.data_begin(), blocks = 0;
    for (size_t i = 0; i < layout.order().size(); ++i) {
      Tensor& tensor = tensors_[files_.back().keys[layout.order()[i]]];
      tensor.file = file;
      tensor.begin = at;
      tensor.end = at += layout.bytes()[i];
      tensor.first_block = blocks;
      blocks += format::cells(tensor.begin, tensor.end);
    }
  }

  for (size_t number = 0; number < catalog.keys.size(); ++number) {
    const metadata::Catalog::Key& key = catalog.keys[number];
    const std::vector<int64_t> strides(key.ndim);
    for (uint64_t i = key.first_chunk; i < key.first_chunk + key.chunks; ++i) {
      const metadata::Catalog::Chunk& chunk = catalog.chunks[i];
      const io::Box box(format::dtypes()[key.dtype].item_bytes, catalog.shape(key), catalog.offset(key, chunk),
                        catalog.size(key, chunk), strides);
      std::vector<Row>& rows = rows_.at(chunk.writer);
      if (rows.size() <= chunk.row) rows.resize(size_t{chunk.row} + 1);
      rows[chunk.row] = {number, box.bytes()};
      if (box.run_bytes() == box.end() - box.begin()) continue;
      (box.run_bytes() < write::kShortRun ? tensors_[number].scattered : tensors_[number].apart) = true;
    }
  }
}

void ExportLayout::bring_short_runs(std::span<const uint32_t> nodes, uint64_t least_bytes) {
  const size_t ranks = rows_.size();
  if (nodes.size() != ranks || std::ranges::any_of(nodes, [&](uint32_t node) { return node >= ranks; })) {
    throw Error::invalid("expected a number below the number of ranks for each rank");
  }
  constexpr uint32_t kNobody = UINT32_MAX, kSeveral = UINT32_MAX - 1;
  std::vector<uint32_t> node_of(tensors_.size(), kNobody);
  for (size_t rank = 0; rank < ranks; ++rank) {
    for (const Row& row : rows_[rank]) {
      if (row.bytes == 0) continue;
      uint32_t& node = node_of[row.tensor];
      node = node == kNobody || node == nodes[rank] ? nodes[rank] : kSeveral;
    }
  }
  std::vector<uint64_t> bytes(ranks);  // one for each node
  for (const bool choose : {false, true}) {
    for (size_t number = 0; number < tensors_.size(); ++number) {
      Tensor& tensor = tensors_[number];
      if (!tensor.scattered || tensor.apart || node_of[number] >= ranks) continue;
      if (!choose) bytes[node_of[number]] += tensor.end - tensor.begin;
      if (choose) tensor.brought = bytes[node_of[number]] >= least_bytes;
    }
  }
}

std::vector<std::vector<int64_t>> ExportLayout::held(const metadata::Catalog& catalog) const {
  if (catalog.keys.size() != tensors_.size() || catalog.ranks != rows_.size()) {
    throw Error::invalid("a layout is not that of this catalog");
  }
  std::vector<std::vector<int64_t>> held(rows_.size());
  for (size_t number = 0; number < tensors_.size(); ++number) {
    const Tensor& tensor = tensors_[number];
    if (!tensor.brought || tensor.begin == tensor.end) continue;
    const metadata::Catalog::Key& key = catalog.keys[number];
    for (uint64_t i = key.first_chunk; i < key.first_chunk + key.chunks; ++i) {
      const metadata::Catalog::Chunk& chunk = catalog.chunks[i];
      append_box(held.at(chunk.writer), chunk.row, tensor.file, static_cast<int64_t>(tensor.begin), key.dtype,
                 catalog.shape(key), catalog.offset(key, chunk), catalog.size(key, chunk));
    }
  }
  return held;
}

std::vector<uint64_t> ExportLayout::straight_bytes() const {
  std::vector<uint64_t> bytes(rows_.size());
  for (size_t rank = 0; rank < rows_.size(); ++rank) {
    for (const Row& row : rows_[rank]) bytes[rank] += tensors_[row.tensor].brought ? 0 : row.bytes;
  }
  return bytes;
}

std::vector<int64_t> ExportLayout::record_locations(uint32_t rank) const {
  if (rank >= rows_.size()) throw Error::invalid("no rank " + std::to_string(rank) + " in this layout");
  std::vector<int64_t> table;
  table.reserve(rows_[rank].size() * kLocationRow);
  for (const Row& row : rows_[rank]) {
    const int64_t file = tensors_[row.tensor].file;
    table.push_back(tensors_[row.tensor].brought ? -1 - file : file);
    table.push_back(static_cast<int64_t>(tensors_[row.tensor].begin));
  }
  return table;
}

std::vector<std::string> ExportLayout::heads(std::span<const std::span<const uint32_t>> checksums) const {
  constexpr const char* kOthers = "checksums that do not fit the layout";
  std::vector<std::vector<uint32_t>> of_file(files_.size());
  struct Found {
    const Tensor* tensor;
    uint64_t missing;  // bytes
  };
  std::vector<std::map<uint64_t, Found>> at(files_.size());  // one for each file, {offset: what was found there}
  for (const Tensor& tensor : tensors_) {
    std::vector<uint32_t>& all = of_file[tensor.file];
    all.resize(std::max<size_t>(all.size(), tensor.first_block + format::cells(tensor.begin, tensor.end)));
    if (tensor.begin != tensor.end) at[tensor.file][tensor.begin] = {&tensor, tensor.end - tensor.begin};
  }
  for (std::span<const uint32_t> rest : checksums) {
    while (!rest.empty()) {
      if (rest.size() < write::PlacedBoxes::kChecksumHead) throw Error::invalid(kOthers);
      const uint64_t file = rest[0], begin = rest[1] | uint64_t{rest[2]} << 32;
      const uint64_t bytes = rest[3] | uint64_t{rest[4]} << 32, first = rest[5], count = rest[6];
      rest = rest.subspan(write::PlacedBoxes::kChecksumHead);
      if (file >= at.size()) throw Error::invalid(kOthers);
      const auto found = at[file].find(begin);
      if (found == at[file].end()) throw Error::invalid(kOthers);
      const Tensor& tensor = *found->second.tensor;
      if (bytes > found->second.missing) throw Error::invalid(kOthers);
      found->second.missing -= bytes;
      const uint64_t cells = format::cells(tensor.begin, tensor.end);
      if (first > cells || count > cells - first || count > rest.size()) throw Error::invalid(kOthers);
      for (uint64_t i = 0; i < count; ++i) of_file[file][tensor.first_block + first + i] ^= rest[i];
      rest = rest.subspan(count);
    }
  }
  for (const auto& tensors : at) {
    if (std::ranges::any_of(tensors, [](const auto& of) { return of.second.missing != 0; })) {
      throw Error::invalid(kOthers);
    }
  }
  std::vector<std::string> heads;
  for (size_t file = 0; file < files_.size(); ++file)
    heads.push_back(files_[file].layout.head(std::move(of_file[file])));
  return heads;
}

std::string ExportLayout::index(std::span<const std::string> names) const {
  if (names.size() != files_.size())
    throw Error::invalid("expected names of " + std::to_string(files_.size()) + " files, got " +
                         std::to_string(names.size()));
  std::vector<size_t> order(tensors_.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::sort(order, {}, [this](size_t number) -> const std::string& { return tensors_[number].name; });
  std::string text =
      "{\n  \"metadata\": {\n    \"total_size\": " + std::to_string(tensor_bytes_) + "\n  },\n  \"weight_map\": {";
  for (const size_t number : order) {
    text += number == order.front() ? "\n    " : ",\n    ";
    format::append_json_string(text, tensors_[number].name);
    text += ": ";
    format::append_json_string(text, names[tensors_[number].file]);
  }
  return text + "\n  }\n}\n";
}

std::vector<int64_t> make_export_boxes(const state::Inventory& inventory, std::span<const int64_t> local_plan,
                                       std::span<const int64_t> record_locations, bool with_brought) {
  constexpr const char* kMalformed = "a layout is not that of this part";
  if (local_plan.size() / kLocalPlanRow != record_locations.size() / kLocationRow ||
      local_plan.size() % kLocalPlanRow != 0) {
    throw Error::invalid(kMalformed);
  }
  std::vector<int64_t> table;
  table.reserve(local_plan.size() * 4);
  for (size_t row = 0; row < local_plan.size() / kLocalPlanRow; ++row) {
    const auto item_words = local_plan.subspan(row * kLocalPlanRow, kLocalPlanRow);
    if (item_words[0] < 0 || static_cast<uint64_t>(item_words[0]) >= inventory.size()) throw Error::invalid(kMalformed);
    const state::Item item = inventory[static_cast<size_t>(item_words[0])];
    if (item.kind == state::ItemKind::object || item_words[1] >= static_cast<int64_t>(item.shape.size())) {
      throw Error::invalid(kMalformed);
    }
    const auto place = record_locations.subspan(row * kLocationRow, kLocationRow);
    if (place[0] < 0 && !with_brought) continue;
    std::vector<int64_t> offset(item.offset.begin(), item.offset.end()), size(item.size.begin(), item.size.end());
    if (item_words[1] >= 0) {
      const auto dim = static_cast<size_t>(item_words[1]);
      offset[dim] += item_words[2];
      size[dim] = item_words[3];
    }
    append_box(table, static_cast<int64_t>(row), place[0] < 0 ? -1 - place[0] : place[0], place[1], item.dtype,
               item.shape, offset, size);
  }
  return table;
}

}  // namespace vescale_ckpt::hf
