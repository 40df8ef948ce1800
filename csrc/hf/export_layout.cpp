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
#include "write/tiles.h"

namespace vescale_ckpt::hf {
namespace {

constexpr size_t kMostNamed = 10;              // keys in an error
constexpr uint64_t kMostMessages = 2'000'000;  // of a save; each takes some hundred bytes of the coordinator's memory
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
  std::map<uint64_t, std::vector<size_t>> keys;  // by the file's number
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
    : tensors_(catalog.keys.size()), rows_(catalog.ranks), joined_(catalog.ranks) {
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

  std::map<std::string_view, std::vector<const Alias*>> aliases_of;  // by the stored tensor
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
      rows[chunk.row] = {number, tensors_[number].begin + box.begin(), tensors_[number].begin + box.end()};
      if (box.run_bytes() == box.end() - box.begin()) continue;
      (box.run_bytes() < write::kShortRun ? tensors_[number].scattered : tensors_[number].apart) = true;
    }
  }
}

std::vector<size_t> ExportLayout::in_file_order() const {
  std::vector<size_t> order;
  for (const File& file : files_) {
    for (const size_t number : file.layout.order()) {
      if (tensors_[file.keys[number]].begin != tensors_[file.keys[number]].end) order.push_back(file.keys[number]);
    }
  }
  return order;
}

std::vector<HeldSpan> ExportLayout::held_spans(std::span<const size_t> order, std::span<const uint32_t> nodes) const {
  std::vector<std::vector<HeldSpan>> spans(tensors_.size());
  for (uint32_t rank = 0; rank < rows_.size(); ++rank) {
    for (const Row& row : rows_[rank]) {
      const Tensor& tensor = tensors_[row.tensor];
      std::vector<HeldSpan>& held = spans[row.tensor];
      if (row.begin == row.end) continue;
      if (!tensor.scattered && !tensor.apart) {
        held.push_back({tensor.file, row.begin, row.end, nodes[rank], rank});
      } else if (held.empty()) {
        held.push_back({tensor.file, tensor.begin, tensor.end, nodes[rank], HeldSpan::kNobody});
        if (tensor.apart) held.back().node = HeldSpan::kNobody;
      } else if (held.back().node != nodes[rank]) {
        held.back().node = HeldSpan::kNobody;
      }
    }
  }
  std::vector<HeldSpan> all;
  for (const size_t number : order) {
    std::ranges::sort(spans[number], {}, &HeldSpan::begin);
    all.insert(all.end(), spans[number].begin(), spans[number].end());
  }
  return all;
}

void ExportLayout::join(std::span<const uint32_t> nodes, uint64_t window_bytes, uint64_t least_bytes) {
  const size_t ranks = rows_.size();
  if (nodes.size() != ranks || !nodes_.empty() || std::ranges::any_of(nodes, [&](uint32_t n) { return n >= ranks; })) {
    throw Error::invalid("a number below the number of ranks is wanted for each rank, once");
  }
  if (std::ranges::none_of(tensors_, &Tensor::scattered)) return;
  nodes_.assign(nodes.begin(), nodes.end());
  std::vector<uint32_t> counts(ranks);
  for (const uint32_t node : nodes) ++counts[node];
  const std::vector<size_t> order = in_file_order();
  ranges_ = choose_node_ranges(held_spans(order, nodes), counts, window_bytes, least_bytes);
  deal_out(order);
}

void ExportLayout::stream(std::span<const uint32_t> nodes, uint64_t window_bytes) {
  const size_t ranks = rows_.size();
  if (nodes.size() != ranks || !nodes_.empty()) throw Error::invalid("a node is wanted for each rank, once");
  nodes_.assign(ranks, 0);  // each rank is a writer for all
  std::vector<uint64_t> bytes;
  for (size_t file = 0; file < files_.size(); ++file) bytes.push_back(file_bytes(file));
  ranges_.push_back(choose_stream_ranges(bytes, static_cast<uint32_t>(ranks), window_bytes));
  deal_out(in_file_order());

  messages_.resize(ranks);
  uint64_t count = 0;
  const auto end_of = [](const NodeRange& range) { return std::pair(range.file, range.end); };
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    for (const Row& row : rows_[rank]) {
      const uint32_t file = tensors_[row.tensor].file;
      auto range = std::ranges::upper_bound(ranges_[0], std::pair(file, row.begin), {}, end_of);
      for (; range != ranges_[0].end() && range->file == file && range->begin < row.end; ++range) {
        if (nodes[rank] == nodes[range->writer]) continue;
        if (messages_[rank].insert({range->round, rank, range->writer}).second && ++count > kMostMessages) {
          throw Error::invalid("ranks of many nodes hold parts of the same rows: more than " +
                               std::to_string(kMostMessages) + " messages would bring them to one writer");
        }
        messages_[range->writer].insert({range->round, rank, range->writer});
      }
    }
  }
}

std::vector<int64_t> ExportLayout::messages(uint32_t rank) const {
  std::vector<int64_t> table;
  for (const std::array<uint32_t, 3>& message : messages_.at(rank)) {
    table.insert(table.end(), message.begin(), message.end());
  }
  return table;
}

// Gives each writer the tensors that its ranges hold.
void ExportLayout::deal_out(std::span<const size_t> order) {
  std::vector<std::vector<uint32_t>> ranks_of(nodes_.size());
  for (uint32_t rank = 0; rank < nodes_.size(); ++rank) ranks_of[nodes_[rank]].push_back(rank);
  for (size_t node = 0; node < ranges_.size(); ++node) {
    size_t first = 0;  // in `order`: the first tensor that ends behind the range
    for (const NodeRange& range : ranges_[node]) {
      rounds_ = std::max<uint64_t>(rounds_, uint64_t{range.round} + 1);
      const auto place = std::pair(range.file, range.begin);
      while (first < order.size() && std::pair(tensors_[order[first]].file, tensors_[order[first]].end) <= place)
        ++first;
      std::vector<Row>& rows = joined_[ranks_of[node][range.writer]];
      for (size_t i = first; i < order.size(); ++i) {
        const Tensor& tensor = tensors_[order[i]];
        if (tensor.file != range.file || tensor.begin >= range.end) break;
        rows.push_back({order[i], std::max(tensor.begin, range.begin), std::min(tensor.end, range.end)});
      }
    }
  }
}

std::vector<int64_t> ExportLayout::joined_ranges(uint32_t rank) const {
  return rounds_ == 0 ? std::vector<int64_t>() : range_rows(ranges_[nodes_.at(rank)]);
}

std::vector<int64_t> ExportLayout::joined_targets(uint32_t rank) const {
  const auto bytes = std::ranges::find(format::dtypes(), std::string_view("uint8"), &format::DType::name);
  const int64_t dtype = bytes - format::dtypes().begin();
  std::vector<int64_t> table;
  for (const Row& row : joined_.at(rank)) {
    const Tensor& tensor = tensors_[row.tensor];
    table.insert(
        table.end(),
        {tensor.file, static_cast<int64_t>(tensor.begin), dtype, 1, static_cast<int64_t>(tensor.end - tensor.begin),
         static_cast<int64_t>(row.begin - tensor.begin), static_cast<int64_t>(row.end - row.begin)});
  }
  return table;
}

std::vector<int64_t> ExportLayout::record_locations(uint32_t rank) const {
  if (rank >= rows_.size()) throw Error::invalid("no rank " + std::to_string(rank) + " in this layout");
  std::vector<int64_t> table;
  table.reserve(rows_[rank].size() * kLocationRow);
  for (const Row& row : rows_[rank]) {
    table.push_back(tensors_[row.tensor].file);
    table.push_back(static_cast<int64_t>(tensors_[row.tensor].begin));
  }
  return table;
}

std::vector<std::string> ExportLayout::heads(std::span<const std::span<const uint32_t>> blocks) const {
  constexpr const char* kOthers = "checksums that do not fit the layout";
  if (blocks.size() != rows_.size()) throw Error::invalid(kOthers);
  std::vector<std::vector<uint32_t>> of_file(files_.size());
  for (const Tensor& tensor : tensors_) {
    std::vector<uint32_t>& all = of_file[tensor.file];
    all.resize(std::max<size_t>(all.size(), tensor.first_block + format::cells(tensor.begin, tensor.end)));
  }
  for (size_t rank = 0; rank < rows_.size(); ++rank) {
    std::span<const uint32_t> rest = blocks[rank];
    for (const std::vector<Row>* rows : {&rows_[rank], &joined_[rank]}) {
      for (const Row& row : *rows) {
        const Tensor& tensor = tensors_[row.tensor];
        const uint64_t count = format::cells(row.begin, row.end);
        if (rest.size() < count) throw Error::invalid(kOthers);
        if (count == 0) continue;
        const uint64_t first =
            tensor.first_block + row.begin / format::kChecksumBlock - tensor.begin / format::kChecksumBlock;
        for (uint64_t i = 0; i < count; ++i) of_file[tensor.file][first + i] ^= rest[i];
        rest = rest.subspan(count);
      }
    }
    if (!rest.empty()) throw Error::invalid(kOthers);
  }
  std::vector<std::string> heads;
  for (size_t file = 0; file < files_.size(); ++file)
    heads.push_back(files_[file].layout.head(std::move(of_file[file])));
  return heads;
}

std::string ExportLayout::index(std::span<const std::string> names) const {
  if (names.size() != files_.size()) throw Error::invalid("as many names as files are wanted");
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

std::vector<int64_t> make_export_targets(const state::Inventory& inventory, std::span<const int64_t> local_plan,
                                         std::span<const int64_t> record_locations) {
  constexpr const char* kMalformed = "a layout is not that of this part";
  if (local_plan.size() / kLocalPlanRow != record_locations.size() / kLocationRow ||
      local_plan.size() % kLocalPlanRow != 0) {
    throw Error::invalid(kMalformed);
  }
  std::vector<int64_t> table;
  table.reserve(local_plan.size() * 3);
  for (size_t row = 0; row < local_plan.size() / kLocalPlanRow; ++row) {
    const auto item_words = local_plan.subspan(row * kLocalPlanRow, kLocalPlanRow);
    if (item_words[0] < 0 || static_cast<uint64_t>(item_words[0]) >= inventory.size()) throw Error::invalid(kMalformed);
    const state::Item item = inventory[static_cast<size_t>(item_words[0])];
    if (item.kind == state::ItemKind::object || item_words[1] >= static_cast<int64_t>(item.shape.size())) {
      throw Error::invalid(kMalformed);
    }
    const auto place = record_locations.subspan(row * kLocationRow, kLocationRow);
    const size_t dims = item.shape.size();
    table.insert(table.end(), {place[0], place[1], int64_t{item.dtype}, static_cast<int64_t>(dims)});
    table.insert(table.end(), item.shape.begin(), item.shape.end());
    table.insert(table.end(), item.offset.begin(), item.offset.end());
    table.insert(table.end(), item.size.begin(), item.size.end());
    if (item_words[1] >= 0) {
      const auto dim = static_cast<size_t>(item_words[1]);
      table[table.size() - 2 * dims + dim] += item_words[2];
      table[table.size() - dims + dim] = item_words[3];
    }
  }
  return table;
}

}  // namespace vescale_ckpt::hf
