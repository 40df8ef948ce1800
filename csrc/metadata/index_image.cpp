#include "metadata/index_image.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>

#include "base/crc32.h"
#include "base/error.h"
#include "base/memory.h"
#include "base/numbered_strings.h"
#include "format/torch_record.h"
#include "metadata/box_tree.h"
#include "metadata/verified_file.h"

namespace vescale_ckpt::metadata {
namespace {

constexpr uint64_t kPiece = VerifiedFile::kPiece;

template <typename Element>
Element* table(std::byte* out, const IndexHeader& header, IndexHeader::Section section) {
  return reinterpret_cast<Element*>(out + header.tables[section].at);
}

}  // namespace

IndexImage::IndexImage(const Catalog& catalog, const RecordLocations& locations, std::string_view save_id,
                       uint64_t pickle_bytes, uint32_t pickle_crc)
    : catalog_(catalog), locations_(locations), save_id_(save_id), dtype_index_(format::dtypes().size(), UINT32_MAX) {
  if (catalog.keys.size() >= UINT32_MAX) throw Error::invalid("too many keys");
  uint64_t dims = 0, text = save_id.size();
  for (const Catalog::Key& key : catalog.keys) {
    text += key.name_bytes;
    if (key.kind == state::ItemKind::object) continue;
    dims += key.ndim + BoxTree(key.chunks, key.ndim).words();
    if (dtype_index_[key.dtype] == UINT32_MAX) {
      dtype_index_[key.dtype] = static_cast<uint32_t>(dtypes_.size());
      dtypes_.push_back(key.dtype);
      text += format::dtypes()[key.dtype].name.size();
    }
  }
  for (const std::string& file : locations.files()) text += file.size();

  const uint64_t slots = std::bit_ceil(2 * std::max<uint64_t>(1, catalog.keys.size()));
  const uint64_t counts[IndexHeader::kSections] = {
      1 + dtypes_.size() + locations.files().size(), text, slots, catalog.keys.size(), dims, catalog.chunks.size()};
  uint64_t at = kPiece;
  for (size_t section = 0; section < IndexHeader::kSections; ++section) {
    header_.tables[section] = {at, counts[section]};
    at = align_up(at + counts[section] * kIndexElement[section], 8);
  }
  header_.checksums = align_up(at, kPiece);
  header_.file_bytes = header_.checksums + (header_.checksums / kPiece - 1) * sizeof(uint32_t);
  std::memcpy(header_.magic, IndexHeader::kMagic.data(), sizeof header_.magic);
  header_.version = IndexHeader::kVersion;
  header_.piece_bytes = kPiece;
  header_.pickle_bytes = pickle_bytes;
  header_.pickle_crc = pickle_crc;
  header_.dtypes = static_cast<uint32_t>(dtypes_.size());
}

void IndexImage::write(std::byte* out) const {
  std::memset(out, 0, kPiece);
  for (size_t section = 0; section < IndexHeader::kSections; ++section) {  // fills the gaps between tables with zeros
    const IndexHeader::Table& of = header_.tables[section];
    const uint64_t end = of.at + of.count * kIndexElement[section];
    const uint64_t next = section + 1 < IndexHeader::kSections ? header_.tables[section + 1].at : header_.checksums;
    std::memset(out + end, 0, next - end);
  }
  write_strings(out);
  write_keys(out);

  auto* checksums = reinterpret_cast<uint32_t*>(out + header_.checksums);
  const uint64_t pieces = header_.checksums / kPiece - 1;
  for (uint64_t i = 0; i < pieces; ++i) checksums[i] = crc32(0, out + (i + 1) * kPiece, kPiece);
  IndexHeader header = header_;
  header.checksums_crc = crc32(0, checksums, pieces * sizeof(uint32_t));
  header.header_crc = crc32(0, &header, sizeof header - sizeof header.header_crc);
  std::memcpy(out, &header, sizeof header);
}

void IndexImage::write_strings(std::byte* out) const {
  auto* ends = table<uint64_t>(out, header_, IndexHeader::kEnds);
  auto* text = table<char>(out, header_, IndexHeader::kText);
  uint64_t end = 0;
  const auto put = [&](std::string_view string) {
    string.copy(text + end, string.size());
    *ends++ = end += string.size();
  };
  put(save_id_);
  for (const uint8_t code : dtypes_) put(format::dtypes()[code].name);
  for (const std::string& file : locations_.files()) put(file);
}

void IndexImage::write_keys(std::byte* out) const {
  auto* text = table<char>(out, header_, IndexHeader::kText);
  auto* slots = table<IndexSlot>(out, header_, IndexHeader::kSlots);
  auto* keys = table<IndexKey>(out, header_, IndexHeader::kKeys);
  auto* dims = table<int64_t>(out, header_, IndexHeader::kDims);
  auto* locations = table<IndexPlace>(out, header_, IndexHeader::kPlaces);
  const uint64_t most = header_.tables[IndexHeader::kSlots].count - 1;
  std::memset(slots, 0, (most + 1) * sizeof *slots);

  uint64_t name_at = table<uint64_t>(out, header_, IndexHeader::kEnds)[header_.tables[IndexHeader::kEnds].count - 1];
  uint64_t dims_at = 0, location_at = 0;
  for (uint32_t i = 0; i < catalog_.keys.size(); ++i) {
    const Catalog::Key& key = catalog_.keys[i];
    const std::string_view name = catalog_.name(key);
    const bool object = key.kind == state::ItemKind::object;
    keys[i] = {name_at,
               dims_at,
               location_at,
               key.chunks,
               key.name_bytes,
               key.ndim,
               object ? 0 : dtype_index_[key.dtype],
               static_cast<uint16_t>(key.kind),
               key.flags};
    name.copy(text + name_at, name.size());
    name_at += name.size();

    const uint32_t crc = crc32(0, name.data(), name.size());
    uint64_t slot = crc & most;
    while (slots[slot].key != 0) slot = (slot + 1) & most;
    slots[slot] = {crc, i + 1};

    const BoxTree tree(key.chunks, key.ndim);
    std::ranges::copy(catalog_.shape(key), dims + dims_at);
    dims_at += key.ndim;
    for (uint64_t number = 0; number < key.chunks; ++number) {
      const Catalog::Chunk& chunk = catalog_.chunks[key.first_chunk + number];
      std::ranges::copy(catalog_.offset(key, chunk), dims + dims_at + 2 * number * key.ndim);
      std::ranges::copy(catalog_.size(key, chunk), dims + dims_at + (2 * number + 1) * key.ndim);
      const RecordLocation location = locations_[chunk];
      locations[location_at++] = {location.offset, location.length,
                                  static_cast<uint32_t>(std::max<int64_t>(location.crc, 0)),
                                  location.file | (location.crc < 0 ? IndexPlace::kNoCrc : 0)};
    }
    tree.fill({dims + dims_at, tree.words()});
    dims_at += tree.words();
  }
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
  const IndexImage image(catalog, of_rows, save_id, 0, 0);
  std::vector<std::byte> bytes(image.bytes());
  image.write(bytes.data());
  return bytes;
}

}  // namespace vescale_ckpt::metadata
