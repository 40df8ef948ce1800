#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "format/torch_record.h"
#include "io/table_cursor.h"
#include "write/writer.h"

namespace vescale_ckpt::write {
namespace {

constexpr uint64_t kFactor = 0x9E3779B97F4A7C15;  // odd, so that multiplication is a bijection

uint64_t mixed(uint64_t hash, const std::byte* element, uint64_t bytes) {
  for (uint64_t at = 0; at < bytes; at += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, element + at, std::min<uint64_t>(sizeof word, bytes - at));
    hash = (hash ^ word) * kFactor;
    hash ^= hash >> 29;
  }
  return hash;
}

// The memory position, in elements, of the element at `position` in C order.
int64_t place_of(int64_t position, std::span<const int64_t> sizes, std::span<const int64_t> strides) {
  int64_t place = 0;
  for (size_t dim = sizes.size(); dim-- > 0; position /= sizes[dim]) place += position % sizes[dim] * strides[dim];
  return place;
}

}  // namespace

std::vector<RecordSource> parse_write_table(std::span<const int64_t> table) {
  std::vector<RecordSource> sources;
  format::RecordCache framings;
  if (table.size() > 2 && table[2] >= 0) {  // exact if all tensors have as many dimensions as the first
    sources.reserve(table.size() / (3 + 2 * std::min<uint64_t>(static_cast<uint64_t>(table[2]), table.size())));
  }
  uint32_t last_dtype = 0;
  std::span<const int64_t> last_sizes;
  for (io::TableCursor cursor(table); !cursor.at_end(); cursor.next_row()) {
    RecordSource source;
    const uint32_t dtype = cursor.dtype(io::kUnchanging, &source.unchanging);
    const std::byte* data = cursor.address();
    const uint64_t dims = cursor.size();
    const auto sizes = cursor.take(dims), strides = cursor.take(dims);
    if (!sources.empty() && dtype == last_dtype && std::ranges::equal(sizes, last_sizes)) {
      source.framing = sources.back().framing;
    } else {
      source.framing = cursor.made_of_row([&] { return framings.get(dtype, sizes); });
    }
    last_dtype = dtype;
    last_sizes = sizes;
    source.data = data;
    source.bytes = source.framing->body_bytes();
    if (!format::contiguous(sizes, strides)) {
      const std::vector<int64_t> origin(dims, 0);
      source.strided.emplace(format::dtypes()[dtype].item_bytes, sizes, origin, sizes, strides);
    }
    sources.push_back(std::move(source));
  }
  return sources;
}

std::vector<RecordSource> parse_dense_table(std::span<const int64_t> table) {
  std::vector<RecordSource> sources;
  for (io::TableCursor cursor(table); !cursor.at_end(); cursor.next_row()) {
    RecordSource& source = sources.emplace_back();
    source.data = cursor.address();
    source.bytes = cursor.size();
  }
  return sources;
}

std::vector<int64_t> body_bytes(std::span<const int64_t> table) {
  std::vector<int64_t> bytes;
  for (io::TableCursor cursor(table); !cursor.at_end(); cursor.next_row()) {
    const uint32_t dtype = cursor.dtype(io::kUnchanging);
    cursor.address();
    const uint64_t dims = cursor.size();
    const auto sizes = cursor.take(dims);
    cursor.take(dims);  // strides
    const uint64_t of_row = cursor.made_of_row([&] { return format::tensor_bytes(format::dtypes()[dtype], sizes); });
    bytes.push_back(static_cast<int64_t>(of_row));
  }
  return bytes;
}

std::vector<uint64_t> sample_hashes(std::span<const int64_t> table, std::span<const int64_t> devices,
                                    uint32_t elements) {
  std::vector<uint64_t> hashes;
  for (io::TableCursor cursor(table); !cursor.at_end(); cursor.next_row()) {
    const uint32_t dtype = cursor.dtype(io::kUnchanging);
    const std::byte* data = cursor.address();
    const uint64_t dims = cursor.size();
    const auto sizes = cursor.take(dims), strides = cursor.take(dims);
    const uint64_t item_bytes = format::dtypes()[dtype].item_bytes;
    const uint64_t bytes = cursor.made_of_row([&] { return format::tensor_bytes(format::dtypes()[dtype], sizes); });
    if (!devices.empty() && devices.size() <= hashes.size()) throw Error::invalid("a table of devices is too short");
    const bool on_host = devices.empty() || devices[hashes.size()] < 0;
    const auto total = static_cast<int64_t>(bytes / item_bytes), count = std::min<int64_t>(elements, total);
    uint64_t hash = 0;
    for (int64_t i = 0; on_host && i < count; ++i) {
      const int64_t position = count == 1 ? 0 : (total - 1) * i / (count - 1);
      hash = mixed(hash + 1, data + place_of(position, sizes, strides) * static_cast<int64_t>(item_bytes), item_bytes);
    }
    hashes.push_back(hash);
  }
  return hashes;
}

}  // namespace vescale_ckpt::write
