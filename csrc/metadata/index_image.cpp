#include "metadata/index_image.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>
#include <utility>

#include "base/crc32.h"
#include "base/error.h"
#include "base/memory.h"
#include "base/numbered_strings.h"
#include "format/torch_record.h"

namespace vescale_ckpt::metadata {
namespace {

constexpr size_t kMostValues = size_t{1} << 12;  // a column with more distinct values has them as codes

// Makes words of `width` bits of each code.
void pack(std::span<const uint64_t> codes, uint32_t width, std::vector<uint64_t>& words) {
  words.assign((codes.size() * width + 63) / 64, 0);
  for (uint64_t i = 0; i < codes.size(); ++i) {
    const uint64_t bit = i * width, shift = bit % 64;
    words[bit / 64] |= codes[i] << shift;
    if (shift + width > 64) words[bit / 64 + 1] |= codes[i] >> (64 - shift);
  }
}

// Numbers values in the order in which they first come. For few values.
class Numbering {
 public:
  explicit Numbering(size_t numbers) : slots_(std::bit_ceil(4 * std::min(numbers, kMostValues))) {}

  // Returns false, and gives up, if there are more than kMostValues values.
  bool run(std::span<const uint64_t> numbers, std::vector<uint64_t>& codes, std::vector<uint64_t>& values) {
    codes.resize(numbers.size());
    bool few = true;
    for (size_t i = 0; i < numbers.size() && few; ++i) {
      uint32_t& number = slots_[slot(numbers[i])];
      if (number == 0) {
        few = values_.size() < kMostValues;
        values_.push_back(numbers[i]);
        number = static_cast<uint32_t>(values_.size());
      }
      codes[i] = number - 1;
    }
    values = values_;
    return few;
  }

 private:
  size_t slot(uint64_t value) const {
    const size_t mask = slots_.size() - 1;
    size_t at = (value * 0x9E3779B97F4A7C15) >> 40 & mask;
    while (slots_[at] != 0 && values_[slots_[at] - 1] != value) at = (at + 1) & mask;
    return at;
  }

  std::vector<uint32_t> slots_;  // number of a value plus 1; 0: free
  std::vector<uint64_t> values_;
};

}  // namespace

uint64_t IndexImage::Words::add(std::span<const uint64_t> added) {
  const uint64_t key = crc32(0, added.data(), added.size_bytes()) | added.size() << 32;
  const auto [begin, end] = known_.equal_range(key);
  for (auto known = begin; known != end; ++known) {
    if (std::ranges::equal(added, std::span(words).subspan(known->second, added.size()))) return known->second;
  }
  known_.emplace(key, words.size());
  words.insert(words.end(), added.begin(), added.end());
  return words.size() - added.size();
}

IndexImage::IndexImage(const Catalog& catalog, const RecordLocations& locations, std::string_view save_id)
    : dtype_index_(format::dtypes().size(), UINT32_MAX) {
  if (catalog.keys.size() >= UINT32_MAX) throw Error::invalid("too many keys");
  add_strings(catalog, locations.files(), save_id);
  crcs_.reserve(catalog.chunks.size());
  std::vector<RecordLocation> located;
  for (size_t i = 0; i < catalog.keys.size(); ++i) {
    const std::span<const Catalog::Chunk> chunks = catalog.chunks_of(i, i + 1);
    located.resize(chunks.size());
    locations.gather(chunks, located.data());
    add_key(catalog, catalog.keys[i], located);
  }
  lay_out();
}

void IndexImage::add_strings(const Catalog& catalog, std::span<const std::string> files, std::string_view save_id) {
  const auto add = [&](std::string_view string) {
    text_ += string;
    ends_.push_back(text_.size());
  };
  add(save_id);
  for (const Catalog::Key& key : catalog.keys) {
    if (key.kind == state::ItemKind::object || dtype_index_[key.dtype] != UINT32_MAX) continue;
    dtype_index_[key.dtype] = header_.dtypes++;
    add(format::dtypes()[key.dtype].name);
  }
  for (const std::string& file : files) add(file);
}

void IndexImage::add_key(const Catalog& catalog, const Catalog::Key& key, std::span<const RecordLocation> locations) {
  const std::string_view name = catalog.name(key);
  const bool object = key.kind == state::ItemKind::object;
  keys_.push_back({text_.size(), dims_of(catalog, key), crcs_.size(), key.chunks, key.name_bytes, key.ndim,
                   object ? 0 : dtype_index_[key.dtype], static_cast<uint16_t>(key.kind), key.flags});
  text_ += name;
  const auto add = [&](const auto& number_of) {
    numbers_.resize(locations.size());
    std::ranges::transform(locations, numbers_.begin(), number_of);
    add_column();
  };
  add([](const RecordLocation& at) { return uint64_t{at.file | (at.crc < 0 ? kNoCrc : 0)}; });
  add([](const RecordLocation& at) { return at.offset; });
  add([](const RecordLocation& at) { return at.length; });
  if (std::ranges::all_of(locations, [](const RecordLocation& at) { return at.crc < 0; })) return;
  for (const RecordLocation& at : locations) crcs_.push_back(static_cast<uint32_t>(std::max<int64_t>(at.crc, 0)));
}

uint64_t IndexImage::dims_of(const Catalog& catalog, const Catalog::Key& key) {
  boxes_.resize(key.ndim * (1 + 2 * key.chunks));
  auto out = std::ranges::copy(catalog.shape(key), boxes_.begin()).out;
  for (uint64_t number = 0; number < key.chunks && key.ndim > 0; ++number) {
    const int64_t* box = catalog.dims.data() + catalog.chunks[key.first_chunk + number].box;
    out = std::copy_n(box, size_t{2} * key.ndim, out);
  }
  return dims_.add(boxes_);
}

void IndexImage::add_column() {
  IndexColumn& column = columns_.emplace_back();
  if (numbers_.empty()) return;
  column.base = numbers_[0];
  column.step = numbers_.size() > 1 ? numbers_[1] - numbers_[0] : 0;
  uint64_t expected = column.base;
  const auto as_expected = [&](uint64_t number) { return number == std::exchange(expected, expected + column.step); };
  if (std::ranges::all_of(numbers_, as_expected)) return;
  const auto [least, most] = std::ranges::minmax(numbers_);
  column.base = least;
  column.step = 0;
  for (uint64_t& number : numbers_) number -= least;
  column.width = static_cast<uint32_t>(std::bit_width(most - least));
  if (Numbering(numbers_.size()).run(numbers_, codes_, values_)) {
    const auto width = static_cast<uint32_t>(std::bit_width(values_.size() - 1));
    if (values_.size() * 64 + numbers_.size() * width < numbers_.size() * column.width) {
      column.width = width;
      column.value_count = static_cast<uint32_t>(values_.size());
      column.values = words_.add(values_);
      numbers_.swap(codes_);
    }
  }
  pack(numbers_, column.width, packed_);
  column.codes = words_.add(packed_);
}

void IndexImage::lay_out() {
  const uint64_t counts[IndexHeader::kSections] = {
      ends_.size(), text_.size(), keys_.size(), dims_.words.size(), columns_.size(), words_.words.size(), crcs_.size()};
  uint64_t at = sizeof header_;
  for (size_t section = 0; section < IndexHeader::kSections; ++section) {
    header_.tables[section] = {at, counts[section]};
    at = align_up(at + counts[section] * kIndexElement[section], 8);
  }
  checksum_at_ = at;
  std::memcpy(header_.magic, IndexHeader::kMagic.data(), sizeof header_.magic);
  header_.version = IndexHeader::kVersion;
}

void IndexImage::write(std::byte* out, uint64_t pickle_bytes, uint32_t pickle_crc) const {
  const void* tables[IndexHeader::kSections] = {ends_.data(),    text_.data(),        keys_.data(), dims_.words.data(),
                                                columns_.data(), words_.words.data(), crcs_.data()};
  IndexHeader header = header_;
  header.pickle_bytes = pickle_bytes;
  header.pickle_crc = pickle_crc;
  std::memcpy(out, &header, sizeof header);
  for (size_t section = 0; section < IndexHeader::kSections; ++section) {
    const IndexHeader::Table& table = header_.tables[section];
    const uint64_t bytes = table.count * kIndexElement[section];
    const uint64_t next = section + 1 < IndexHeader::kSections ? header_.tables[section + 1].at : checksum_at_;
    if (bytes != 0) std::memcpy(out + table.at, tables[section], bytes);
    std::memset(out + table.at + bytes, 0, next - table.at - bytes);
  }
  const uint32_t crc = crc32(0, out, checksum_at_);
  std::memcpy(out + checksum_at_, &crc, sizeof crc);
}

namespace {

[[noreturn]] void contradictory(std::string_view name, const char* what) {
  throw Error::invalid(std::string(name) + ": the metadata gives it " + what);
}

void check_row(const state::Item& row, const state::Item& first) {
  const bool object = row.kind == state::ItemKind::object;
  if (object != (first.kind == state::ItemKind::object)) contradictory(row.name, "as an object and as a tensor");
  if (object) return;
  if (row.dtype != first.dtype || !std::ranges::equal(row.shape, first.shape)) {
    contradictory(row.name, "several shapes or dtypes");
  }
  format::tensor_bytes(format::dtypes()[row.dtype], row.shape);  // throws for an impossible shape
  for (size_t dim = 0; dim < row.shape.size(); ++dim) {
    if (row.offset[dim] < 0 || row.offset[dim] > row.shape[dim] || row.size[dim] < 0 ||
        row.size[dim] > row.shape[dim] - row.offset[dim]) {
      contradictory(row.name, "a chunk that leaves it");
    }
  }
}

// In the result the writer of all chunks is 0, and the row of a chunk is its row in `rows`.
Catalog catalog_of(const state::Inventory& rows) {
  Catalog catalog;
  catalog.ranks = 1;
  NumberedStrings names;
  std::vector<uint32_t> first_row, key_of_row(rows.size());
  for (uint32_t i = 0; i < rows.size(); ++i) {
    const state::Item row = rows[i];
    const auto [key, is_new] = names.add(row.name);
    if (is_new) {
      const auto ndim = static_cast<uint32_t>(row.shape.size());
      catalog.keys.push_back({names.begin(key), static_cast<uint32_t>(row.name.size()), row.kind, row.dtype, row.flags,
                              ndim, catalog.dims.size(), 0, 0});
      catalog.dims.insert(catalog.dims.end(), row.shape.begin(), row.shape.end());
      first_row.push_back(i);
    } else if (row.kind == state::ItemKind::object) {
      contradictory(row.name, "several times");
    }
    check_row(row, rows[first_row[key]]);
    key_of_row[i] = key;
    ++catalog.keys[key].chunks;
  }

  catalog.names = names.text();
  uint64_t first = 0;
  for (Catalog::Key& key : catalog.keys) {
    key.first_chunk = first;
    first += key.chunks;
  }
  std::vector<uint64_t> next(catalog.keys.size());
  std::ranges::transform(catalog.keys, next.begin(), &Catalog::Key::first_chunk);
  catalog.chunks.resize(rows.size());
  for (uint32_t i = 0; i < rows.size(); ++i) {
    const state::Item row = rows[i];
    catalog.chunks[next[key_of_row[i]]++] = {catalog.dims.size(), 0, i};
    catalog.dims.insert(catalog.dims.end(), row.offset.begin(), row.offset.end());
    catalog.dims.insert(catalog.dims.end(), row.size.begin(), row.size.end());
  }
  for (const Catalog::Key& key : catalog.keys) {
    const auto begin = catalog.chunks.begin() + static_cast<ptrdiff_t>(key.first_chunk);
    std::stable_sort(begin, begin + static_cast<ptrdiff_t>(key.chunks), [&](const auto& a, const auto& b) {
      return std::ranges::lexicographical_compare(catalog.offset(key, a), catalog.offset(key, b));
    });
  }
  return catalog;
}

}  // namespace

std::vector<std::byte> index_of_rows(const state::Inventory& rows, std::span<const int64_t> locations,
                                     const std::vector<std::string>& files, std::string_view save_id) {
  if (locations.size() != rows.size() * RecordLocations::kWords)
    throw Error::invalid("expected as many locations as rows");
  const Catalog catalog = catalog_of(rows);
  const RecordLocations of_rows({locations}, {files});
  const IndexImage image(catalog, of_rows, save_id);
  std::vector<std::byte> bytes(image.bytes());
  image.write(bytes.data(), 0, 0);
  return bytes;
}

}  // namespace vescale_ckpt::metadata
