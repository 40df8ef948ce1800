#include "io/table.h"

#include <utility>

#include "error.h"

namespace vescale_ckpt::io {
namespace {

// Whether elements lie one behind the other; dimensions of one element may have any stride.
bool contiguous(std::span<const int64_t> sizes, std::span<const int64_t> strides) {
  int64_t expected = 1;
  for (size_t dim = sizes.size(); dim-- > 0;) {
    if (sizes[dim] == 0) return true;
    if (sizes[dim] != 1 && strides[dim] != expected) return false;
    expected *= sizes[dim];
  }
  return true;
}

}  // namespace

std::vector<RecordSource> parse_write_table(std::span<const int64_t> table) {
  std::vector<RecordSource> sources;
  format::RecordCache framings;
  for (TableCursor cursor(table); !cursor.at_end(); cursor.next_row()) {
    const uint32_t dtype = cursor.dtype();
    const std::byte* data = cursor.address();
    const uint64_t dims = cursor.size();
    const auto sizes = cursor.take(dims), strides = cursor.take(dims);
    RecordSource source;
    try {
      source.framing = framings.get(dtype, sizes);
    } catch (const Error& error) {
      throw Error::invalid(error.what(), cursor.row());
    }
    source.data = data;
    source.bytes = source.framing->body_bytes();
    if (!contiguous(sizes, strides)) {
      const std::vector<int64_t> origin(dims, 0);
      source.strided.emplace(format::dtypes()[dtype].item_bytes, sizes, origin, sizes, strides);
    }
    sources.push_back(std::move(source));
  }
  return sources;
}

std::vector<ReadItem> parse_read_table(std::span<const int64_t> table) {
  std::vector<ReadItem> items;
  for (TableCursor cursor(table); !cursor.at_end(); cursor.next_row()) {
    const auto file = static_cast<uint32_t>(cursor.size());
    const uint64_t offset = cursor.size(), length = cursor.size();
    const int64_t crc = cursor.take(1)[0];
    const uint32_t dtype = cursor.dtype();
    const uint64_t dims = cursor.size();
    const auto chunk = cursor.take(dims), offsets = cursor.take(dims), sizes = cursor.take(dims);
    std::byte* memory = cursor.address();
    const auto strides = cursor.take(dims);
    try {
      format::tensor_bytes(format::dtypes()[dtype], chunk);  // overflow in a lying shape
      items.push_back({file,
                       offset,
                       length,
                       dtype,
                       {chunk.begin(), chunk.end()},
                       Box(format::dtypes()[dtype].item_bytes, chunk, offsets, sizes, strides),
                       memory,
                       crc});
    } catch (const Error& error) {
      throw Error::invalid(error.what(), cursor.row());
    }
  }
  return items;
}

std::vector<ReadItem> parse_check_table(std::span<const int64_t> table) {
  std::vector<ReadItem> items;
  for (TableCursor cursor(table); !cursor.at_end(); cursor.next_row()) {
    const auto file = static_cast<uint32_t>(cursor.size());
    const uint64_t offset = cursor.size(), length = cursor.size();
    const int64_t crc = cursor.take(1)[0];
    const uint32_t dtype = cursor.dtype();
    const auto sizes = cursor.take(cursor.size());
    const std::vector<int64_t> zeros(sizes.size());
    try {
      format::tensor_bytes(format::dtypes()[dtype], sizes);
      const Box whole(format::dtypes()[dtype].item_bytes, sizes, zeros, sizes, zeros);
      items.push_back({file, offset, length, dtype, {sizes.begin(), sizes.end()}, whole, nullptr, crc});
    } catch (const Error& error) {
      throw Error::invalid(error.what(), cursor.row());
    }
  }
  return items;
}

std::vector<ByteRange> parse_range_table(std::span<const int64_t> table) {
  std::vector<ByteRange> ranges;
  for (TableCursor cursor(table); !cursor.at_end(); cursor.next_row()) {
    const auto file = static_cast<uint32_t>(cursor.size());
    const uint64_t offset = cursor.size();
    ranges.push_back({file, offset, cursor.size()});
  }
  return ranges;
}

std::vector<BoxCopy> parse_copy_table(std::span<const int64_t> table) {
  std::vector<BoxCopy> copies;
  for (TableCursor cursor(table); !cursor.at_end(); cursor.next_row()) {
    const uint32_t dtype = cursor.dtype();
    const std::byte* piece = cursor.address();
    const uint64_t dims = cursor.size();
    const auto sizes = cursor.take(dims), offsets = cursor.take(dims), lengths = cursor.take(dims);
    std::byte* memory = cursor.address();
    const auto strides = cursor.take(dims);
    try {
      format::tensor_bytes(format::dtypes()[dtype], sizes);
      copies.push_back({Box(format::dtypes()[dtype].item_bytes, sizes, offsets, lengths, strides), piece, memory});
    } catch (const Error& error) {
      throw Error::invalid(error.what(), cursor.row());
    }
  }
  return copies;
}

}  // namespace vescale_ckpt::io
