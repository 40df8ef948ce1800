#include "io/table_cursor.h"
#include "read/reader.h"

namespace vescale_ckpt::read {
namespace {

// The place of a row's box in its chunk and in memory.
struct Target {
  std::span<const int64_t> offsets, sizes;
  std::byte* memory;
  std::span<const int64_t> strides;
};

// `take_target(cursor, chunk)` reads the words behind the sizes of the chunk in each row.
template <typename TakeTarget>
std::vector<ReadItem> parse(std::span<const int64_t> table, const TakeTarget& take_target) {
  std::vector<ReadItem> items;
  for (io::TableCursor cursor(table); !cursor.at_end(); cursor.next_row()) {
    const auto file = static_cast<uint32_t>(cursor.size());
    const uint64_t offset = cursor.size(), length = cursor.size();
    const int64_t crc = cursor.take(1)[0];
    const uint32_t dtype = cursor.dtype();
    const auto chunk = cursor.take(cursor.size());
    const Target target = take_target(cursor, chunk);
    items.push_back(cursor.made_of_row([&]() -> ReadItem {
      format::tensor_bytes(format::dtypes()[dtype], chunk);  // throws for a shape that overflows
      return {file,
              offset,
              length,
              dtype,
              {chunk.begin(), chunk.end()},
              io::Box(format::dtypes()[dtype].item_bytes, chunk, target.offsets, target.sizes, target.strides),
              target.memory,
              crc};
    }));
  }
  return items;
}

}  // namespace

ReadItem range_item(uint32_t file, uint64_t offset, uint64_t length, std::byte* memory) {
  const int64_t start = 0, stride = 1;
  const auto size = static_cast<int64_t>(length);
  return {.file = file,
          .record_offset = offset,
          .record_length = length,
          .dtype = 0,
          .chunk_sizes = {},
          .box = io::Box(1, {&size, 1}, {&start, 1}, {&size, 1}, {&stride, 1}),
          .memory = memory,
          .bare = true};
}

std::vector<ReadItem> parse_read_table(std::span<const int64_t> table, std::span<const int64_t> devices) {
  std::vector<ReadItem> items = parse(table, [](io::TableCursor& cursor, std::span<const int64_t> chunk) -> Target {
    const auto offsets = cursor.take(chunk.size()), sizes = cursor.take(chunk.size());
    std::byte* memory = cursor.address();
    return {offsets, sizes, memory, cursor.take(chunk.size())};
  });
  if (devices.empty()) return items;
  if (devices.size() != items.size()) throw Error::invalid("not a device for each row of the table");
  for (size_t row = 0; row < items.size(); ++row) items[row].device = static_cast<int>(devices[row]);
  return items;
}

std::vector<ReadItem> parse_check_table(std::span<const int64_t> table) {
  std::vector<int64_t> zeros;
  return parse(table, [&](io::TableCursor&, std::span<const int64_t> chunk) -> Target {
    zeros.resize(chunk.size());
    return {zeros, chunk, nullptr, zeros};
  });
}

}  // namespace vescale_ckpt::read
