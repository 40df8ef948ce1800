#include "share/route_tables.h"

#include <algorithm>
#include <array>
#include <utility>

#include "base/error.h"
#include "format/torch_record.h"
#include "io/table_cursor.h"
#include "state/inventory.h"
#include "state/tables.h"

namespace vescale_ckpt::share {
namespace {

using state::append;

constexpr size_t kStagedHead = 8, kPackHead = 4, kOwnHead = 7, kPlaceHead = 5, kMemoryRow = 3;
constexpr size_t kNotHeld = SIZE_MAX;

// A row: a head, whose last word is the number of dimensions n, and lists of n words.
struct Row {
  std::span<const int64_t> head, first, second, third, fourth;
  size_t size() const { return head.size() + first.size() + second.size() + third.size() + fourth.size(); }
};

// Parses the row at `at`, with a head of `head` words and three or four lists.
Row row_at(std::span<const int64_t> table, size_t at, size_t head, int64_t row, size_t lists = 3) {
  const auto rest = table.subspan(at);
  const auto malformed = [row] { return Error::invalid("a table of a round is malformed", row); };
  if (rest.size() < head) throw malformed();
  const int64_t dims = rest[head - 1];
  if (dims < 0 || dims > state::kMostDims || rest.size() - head < lists * static_cast<size_t>(dims)) throw malformed();
  const auto n = static_cast<size_t>(dims);
  const auto list = [&](size_t number) { return rest.subspan(head + number * n, n); };
  return {rest.first(head), list(0), list(1), list(2), lists > 3 ? list(3) : std::span<const int64_t>()};
}

// Translates each row of `table`. `append_head(row, number, made)` appends the first words of the engine's row to
// `made`, and returns the buffer offset and the dtype of a contiguous piece, whose sizes are row.third. The row of the
// engine ends with the piece's address and strides.
template <typename AppendHead>
std::vector<int64_t> translated(std::span<const int64_t> table, size_t head, std::span<const std::byte> memory,
                                const AppendHead& append_head) {
  std::vector<int64_t> made;
  int64_t number = 0;
  for (size_t at = 0; at < table.size(); ++number) {
    const Row row = row_at(table, at, head, number);
    at += row.size();
    const auto [offset, dtype] = append_head(row, number, made);
    for (const auto list : {row.first, row.second, row.third}) append(made, list);
    made.push_back(state::address_in(memory, offset, dtype, row.third, number));
    append(made, format::contiguous_strides(row.third));
  }
  return made;
}

}  // namespace

std::vector<int64_t> make_staging_table(std::span<const int64_t> staged, std::span<const std::byte> memory) {
  return translated(staged, kStagedHead, memory, [](const Row& row, int64_t, std::vector<int64_t>& made) {
    append(made, row.head.subspan(2));
    return std::pair(row.head[0], row.head[6]);
  });
}

std::vector<int64_t> make_pack_table(std::span<const int64_t> packs, std::span<const std::byte> memory) {
  return translated(packs, kPackHead, memory, [&](const Row& row, int64_t number, std::vector<int64_t>& made) {
    const int64_t dtype = row.head[2];
    append(made, std::array{dtype, state::address_in(memory, row.head[0], dtype, row.first, number), row.head[3]});
    return std::pair(row.head[1], dtype);
  });
}

HeldRows::HeldRows(std::vector<int64_t> table, std::span<const int64_t> rows) : table_(std::move(table)) {
  if (std::ranges::any_of(rows, [](int64_t row) { return row < 0 || row > INT32_MAX; })) {
    throw Error::invalid("no such row of a part");
  }
  at_.assign(rows.empty() ? 0 : static_cast<size_t>(std::ranges::max(rows)) + 1, kNotHeld);
  io::TableCursor cursor(table_);
  for (; !cursor.at_end(); cursor.next_row()) {
    const int64_t dtype = cursor.dtype(io::kUnchanging), address = cursor.take(1)[0];
    const uint64_t dims = cursor.size();
    const auto sizes = cursor.take(dims), strides = cursor.take(dims);
    if (held_.size() == rows.size()) throw Error::invalid("expected as many rows as tensors");
    at_[static_cast<size_t>(rows[held_.size()])] = held_.size();
    held_.push_back({dtype, address, sizes, strides});
  }
  if (held_.size() != rows.size()) throw Error::invalid("expected as many rows as tensors");
}

const HeldRows::Held* HeldRows::find(int64_t row) const {
  const bool known = row >= 0 && static_cast<uint64_t>(row) < at_.size() && at_[static_cast<size_t>(row)] != kNotHeld;
  return known ? &held_[at_[static_cast<size_t>(row)]] : nullptr;
}

int64_t HeldRows::Held::address_of(std::span<const int64_t> offsets, std::span<const int64_t> lengths,
                                   int64_t row) const {
  const auto leaves = [row] { return Error::invalid("a tensor is not what the layout was made for", row); };
  if (offsets.size() != sizes.size()) throw leaves();
  int64_t first = 0;
  bool empty = false;
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    const int64_t offset = offsets[dim], length = lengths[dim];
    if (offset < 0 || length < 0 || offset > sizes[dim] || length > sizes[dim] - offset) throw leaves();
    empty = empty || length == 0;
    first += offset * strides[dim];
  }
  return empty ? address : address + first * format::dtypes()[static_cast<size_t>(dtype)].item_bytes;
}

std::vector<int64_t> make_box_table(std::span<const int64_t> own, const HeldRows& held) {
  std::vector<int64_t> made;
  int64_t number = 0;
  for (size_t at = 0; at < own.size(); ++number) {
    const Row row = row_at(own, at, kOwnHead, number, 4);
    at += row.size();
    const HeldRows::Held* memory = held.find(row.head[0]);
    if (memory == nullptr) continue;
    if (memory->dtype != row.head[5]) throw Error::invalid("a tensor is not of the layout's dtype", number);
    append(made, row.head.subspan(1));
    for (const auto list : {row.first, row.second, row.third}) append(made, list);
    made.push_back(memory->address_of(row.fourth, row.third, number));
    append(made, memory->strides);
  }
  return made;
}

std::vector<int64_t> make_gather_table(std::span<const int64_t> places, const HeldRows& held,
                                       std::span<const int64_t> memories) {
  std::vector<int64_t> made;
  int64_t number = 0;
  for (size_t at = 0; at < places.size(); ++number) {
    const Row row = row_at(places, at, kPlaceHead, number, 4);
    at += row.size();
    const HeldRows::Held* from = held.find(row.head[2]);
    if (from == nullptr || from->dtype != row.head[3]) throw Error::invalid("no such box is held", number);
    std::span<const std::byte> memory;
    for (size_t i = 0; i + kMemoryRow <= memories.size(); i += kMemoryRow) {
      if (memories[i] != row.head[0]) continue;
      memory = {reinterpret_cast<const std::byte*>(static_cast<uintptr_t>(memories[i + 1])),
                static_cast<size_t>(memories[i + 2])};
    }
    append(made, std::array{from->dtype, state::address_in(memory, row.head[1], from->dtype, row.first, number),
                            static_cast<int64_t>(row.first.size())});
    for (const auto list : {row.first, row.second, row.third}) append(made, list);
    made.push_back(from->address_of(row.fourth, row.third, number));
    append(made, from->strides);
  }
  return made;
}

}  // namespace vescale_ckpt::share
