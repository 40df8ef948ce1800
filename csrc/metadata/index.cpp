#include "metadata/index.h"

#include <algorithm>
#include <cstring>

#include "base/crc32.h"
#include "base/error.h"
#include "base/overlap.h"
#include "format/torch_record.h"
#include "metadata/metadata_pickle.h"

namespace vescale_ckpt::metadata {
namespace {

constexpr uint32_t kMostDtypes = 256;
constexpr uint64_t kLeastPickled = 16;  // fewer bytes than a chunk takes in `.metadata`

// Whether first .. first + count lie within the size.
bool within(uint64_t first, uint64_t count, uint64_t all) {
  return first <= all && count <= all - first;
}

}  // namespace

void Index::corrupt(const char* what) const {
  throw Error::corrupt((path_.empty() ? "the index" : path_) + " is no sound index: " + what, path_, 0);
}

Index::Index(std::vector<std::byte> image, std::string path) : content_(std::move(image)), path_(std::move(path)) {
  uint32_t crc = 0;  // it ends the file
  expect(content_.size() >= sizeof header_ + sizeof crc, "it is cut short");
  const uint64_t end = content_.size() - sizeof crc;
  std::memcpy(&header_, content_.data(), sizeof header_);
  std::memcpy(&crc, content_.data() + end, sizeof crc);
  expect(std::string_view(header_.magic, sizeof header_.magic) == IndexHeader::kMagic, "it begins otherwise");
  expect(header_.version == IndexHeader::kVersion, "it is of another version");
  expect(crc32(0, content_.data(), end) == crc, "its checksum differs");
  for (size_t section = 0; section < IndexHeader::kSections; ++section) {
    const auto [at, count] = header_.tables[section];
    expect(at % 8 == 0 && at <= end && count <= (end - at) / kIndexElement[section], "a table lies outside of it");
  }
  expect(header_.tables[IndexHeader::kColumns].count / kIndexColumns >= size(), "it lacks columns");
  const uint64_t strings = header_.tables[IndexHeader::kEnds].count;
  expect(header_.dtypes <= kMostDtypes && strings >= 1 + header_.dtypes, "it lacks names");
  expect(strings < kNoCrc && size() < UINT32_MAX, "it names too much");

  save_id_ = string(0);
  for (uint32_t i = 0; i < header_.dtypes; ++i) {
    dtypes_.push_back(string(1 + i));
    dtype_codes_.push_back(format::dtype_named(dtypes_.back()));
  }
  for (uint64_t number = 0; number < size(); ++number)
    expect(names_.add(key(number).name).second, "it names a key twice");
}

template <typename Element>
const Element* Index::elements(IndexHeader::Section section, uint64_t first) const {
  return reinterpret_cast<const Element*>(content_.data() + header_.tables[section].at + first * sizeof(Element));
}

std::string_view Index::text(uint64_t begin, uint64_t bytes) const {
  expect(within(begin, bytes, header_.tables[IndexHeader::kText].count), "a name lies outside of its text");
  return {elements<char>(IndexHeader::kText, begin), bytes};
}

std::string_view Index::string(uint64_t number) const {
  const uint64_t begin = number == 0 ? 0 : *elements<uint64_t>(IndexHeader::kEnds, number - 1);
  const uint64_t end = *elements<uint64_t>(IndexHeader::kEnds, number);
  expect(begin <= end, "its names overlap");
  return text(begin, end - begin);
}

bool Index::matches(std::span<const std::byte> trailer, uint64_t metadata_bytes) const {
  if (trailer.size() != MetadataTrailer::kBytes) return false;
  uint32_t length = 0, crc = 0;
  std::memcpy(&length, trailer.data() + 8, sizeof length);
  std::memcpy(&crc, trailer.data() + 12, sizeof crc);
  return std::memcmp(trailer.data(), MetadataTrailer::kMagic.data(), MetadataTrailer::kMagic.size()) == 0 &&
         length == static_cast<uint32_t>(header_.pickle_bytes) && crc == header_.pickle_crc &&
         metadata_bytes == header_.pickle_bytes + MetadataTrailer::kBytes;
}

Index::Key Index::key(uint64_t number) const {
  const IndexKey& row = *elements<IndexKey>(IndexHeader::kKeys, number);
  const bool object = row.kind == static_cast<uint16_t>(state::ItemKind::object);
  expect(row.kind <= 2 && row.ndim <= state::kMostDims && (!object || (row.ndim == 0 && row.chunks == 1)),
         "a key is of no known kind");
  expect(object || row.dtype < header_.dtypes, "a key has an unknown dtype");
  const uint64_t all_dims = header_.tables[IndexHeader::kDims].count;
  expect(within(row.dims, row.ndim, all_dims), "a key's shape lies outside of it");
  expect(row.chunks <= (row.ndim == 0 ? 1 : (all_dims - row.dims - row.ndim) / (uint64_t{2} * row.ndim)),
         "a key's chunks lie outside of it");
  Key key{text(row.name, row.name_bytes),
          static_cast<state::ItemKind>(row.kind),
          {},
          {},
          row.flags,
          {},
          row.chunks,
          number,
          row.dims,
          row.first_crc};
  if (object) return key;
  key.dtype = dtypes_[row.dtype];
  key.dtype_code = dtype_codes_[row.dtype];
  key.shape = {elements<int64_t>(IndexHeader::kDims, row.dims), row.ndim};
  for (const int64_t dim : key.shape) expect(dim >= 0 && static_cast<uint64_t>(dim) < kFarthest, "an absurd shape");
  return key;
}

std::optional<Index::Key> Index::find(std::string_view name) const {
  const auto number = names_.find(name);
  return number ? std::optional(key(*number)) : std::nullopt;
}

void Index::check_inside(const Key& key, const int64_t* box) const {
  for (size_t dim = 0; dim < key.shape.size(); ++dim) {
    const int64_t size = box[key.shape.size() + dim];
    expect(box[dim] >= 0 && box[dim] <= key.shape[dim] && size >= 0 && size <= key.shape[dim] - box[dim],
           "a chunk leaves its tensor");
  }
}

std::span<const int64_t> Index::box(const Key& key, uint64_t chunk) const {
  const uint64_t words = 2 * key.shape.size();
  const int64_t* box = elements<int64_t>(IndexHeader::kDims, key.dims + key.shape.size() + chunk * words);
  check_inside(key, box);
  return {box, words};
}

void Index::overlaps(const Key& key, std::span<const int64_t> offset, std::span<const int64_t> size,
                     const std::function<void(uint64_t, const int64_t*)>& found) const {
  const size_t ndim = key.shape.size();
  const int64_t* box = elements<int64_t>(IndexHeader::kDims, key.dims + ndim);
  for (uint64_t chunk = 0; chunk < key.chunks; ++chunk, box += 2 * ndim) {
    bool meets = true;
    for (size_t dim = 0; dim < ndim && meets; ++dim) {
      meets = !overlap(offset[dim], size[dim], box[dim], box[ndim + dim]).empty();
    }
    if (!meets) {
      if (ndim != 0 && box[0] >= end_of(offset[0], size[0])) return;  // as all chunks after it
      continue;
    }
    check_inside(key, box);
    found(chunk, box);
  }
}

uint64_t Index::code(const IndexColumn& column, uint64_t chunk) const {
  const uint64_t words = header_.tables[IndexHeader::kWords].count;
  const uint64_t bit = chunk * column.width, shift = bit % 64;  // chunks are no more than the file has bytes
  const uint64_t count = shift + column.width > 64 ? 2 : 1;
  expect(within(column.codes, bit / 64 + count, words), "the codes of a column lie outside of it");
  const uint64_t* word = elements<uint64_t>(IndexHeader::kWords, column.codes + bit / 64);
  const uint64_t code = word[0] >> shift | (count > 1 ? word[1] << (64 - shift) : 0);
  return code & ((uint64_t{1} << column.width) - 1);
}

uint64_t Index::column(uint64_t number, uint64_t chunk) const {
  const IndexColumn& column = *elements<IndexColumn>(IndexHeader::kColumns, number);
  uint64_t value = column.base + column.step * chunk;
  if (column.width == 0) return value;
  expect(column.width <= IndexColumn::kMostWidth, "a column has absurd codes");
  const uint64_t coded = code(column, chunk);
  if (column.value_count == 0) return value + coded;
  expect(coded < column.value_count &&
             within(column.values, column.value_count, header_.tables[IndexHeader::kWords].count),
         "the values of a column lie outside of it");
  return value + *elements<uint64_t>(IndexHeader::kWords, column.values + coded);
}

RecordLocation Index::location(const Key& key, uint64_t chunk) const {
  const uint64_t first = kIndexColumns * key.number;
  const uint64_t file = column(first, chunk);
  expect(file <= UINT32_MAX, "a chunk lies in a file without a name");
  RecordLocation found{static_cast<uint32_t>(file) & ~kNoCrc, column(first + 1, chunk), column(first + 2, chunk), -1};
  if ((file & kNoCrc) == 0) {
    expect(within(key.first_crc, chunk + 1, header_.tables[IndexHeader::kCrcs].count), "a chunk lacks its checksum");
    found.crc = *elements<uint32_t>(IndexHeader::kCrcs, key.first_crc + chunk);
  }
  expect(found.file < files(), "a chunk lies in a file without a name");
  expect(found.offset < kFarthest && found.length < kFarthest, "a chunk lies nowhere");
  return found;
}

void Index::check_counts() const {
  if (header_.pickle_bytes == 0) return;
  uint64_t chunks = 0;
  for (uint64_t number = 0; number < size(); ++number) chunks += key(number).chunks;
  expect(chunks <= header_.pickle_bytes / kLeastPickled, "it lists more chunks than its metadata has room for");
}

std::vector<uint64_t> Index::file_ends() const {
  check_counts();
  std::vector<uint64_t> ends(files());
  for (uint64_t number = 0; number < size(); ++number) {
    const Key found = key(number);
    for (uint64_t chunk = 0; chunk < found.chunks; ++chunk) {
      const RecordLocation at = location(found, chunk);
      ends[at.file] = std::max(ends[at.file], at.offset + at.length);
    }
  }
  return ends;
}

}  // namespace vescale_ckpt::metadata
