#include "write/write_table.h"

#include <algorithm>
#include <utility>

#include "io/table_cursor.h"

namespace vescale_ckpt::write {
std::vector<RecordSource> parse_write_table(std::span<const int64_t> table) {
  std::vector<RecordSource> sources;
  format::RecordCache framings;
  if (table.size() > 2 && table[2] >= 0) {  // as many as there are if all are like the first
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

}  // namespace vescale_ckpt::write
