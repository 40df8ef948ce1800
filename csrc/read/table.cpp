#include "read/table.h"

#include <utility>

#include "base/error.h"
#include "io/table.h"

namespace vescale_ckpt::read {

std::vector<ReadItem> parse_read_table(std::span<const int64_t> table) {
  std::vector<ReadItem> items;
  for (io::TableCursor cursor(table); !cursor.at_end(); cursor.next_row()) {
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
                       io::Box(format::dtypes()[dtype].item_bytes, chunk, offsets, sizes, strides),
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
  for (io::TableCursor cursor(table); !cursor.at_end(); cursor.next_row()) {
    const auto file = static_cast<uint32_t>(cursor.size());
    const uint64_t offset = cursor.size(), length = cursor.size();
    const int64_t crc = cursor.take(1)[0];
    const uint32_t dtype = cursor.dtype();
    const auto sizes = cursor.take(cursor.size());
    const std::vector<int64_t> zeros(sizes.size());
    try {
      format::tensor_bytes(format::dtypes()[dtype], sizes);
      const io::Box whole(format::dtypes()[dtype].item_bytes, sizes, zeros, sizes, zeros);
      items.push_back({file, offset, length, dtype, {sizes.begin(), sizes.end()}, whole, nullptr, crc});
    } catch (const Error& error) {
      throw Error::invalid(error.what(), cursor.row());
    }
  }
  return items;
}

std::vector<ByteRange> parse_range_table(std::span<const int64_t> table) {
  std::vector<ByteRange> ranges;
  for (io::TableCursor cursor(table); !cursor.at_end(); cursor.next_row()) {
    const auto file = static_cast<uint32_t>(cursor.size());
    const uint64_t offset = cursor.size();
    ranges.push_back({file, offset, cursor.size()});
  }
  return ranges;
}

}  // namespace vescale_ckpt::read
