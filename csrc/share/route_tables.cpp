#include "share/route_tables.h"

#include <array>
#include <utility>

#include "base/error.h"
#include "share/words.h"
#include "state/inventory.h"
#include "state/tables.h"

namespace vescale_ckpt::share {
namespace {

constexpr size_t kStagedHead = 8, kPackHead = 4;

// One row: a head whose last word is the number of dimensions, and three lists of so many.
struct Row {
  std::span<const int64_t> head, first, second, third;
};

Row row_at(std::span<const int64_t> table, size_t at, size_t head, int64_t row) {
  const auto rest = table.subspan(at);
  const auto malformed = [row] { return Error::invalid("a table of a round is malformed", row); };
  if (rest.size() < head) throw malformed();
  const int64_t dims = rest[head - 1];
  if (dims < 0 || dims > state::kMostDims || rest.size() - head < 3 * static_cast<size_t>(dims)) throw malformed();
  const auto n = static_cast<size_t>(dims);
  return {rest.first(head), rest.subspan(head, n), rest.subspan(head + n, n), rest.subspan(head + 2 * n, n)};
}

void append_contiguous_strides(std::vector<int64_t>& to, std::span<const int64_t> sizes) {
  const size_t begin = to.size();
  to.resize(begin + sizes.size());
  int64_t stride = 1;
  for (size_t dim = sizes.size(); dim-- > 0;) {
    to[begin + dim] = stride;
    stride *= sizes[dim];
  }
}

// Makes a row of the engine of each row of `table`. `append_head(row, number, made)` appends its first words, and
// returns the offset in the memory and the dtype of the piece of row.third's sizes at which the row ends.
template <typename AppendHead>
std::vector<int64_t> translated(std::span<const int64_t> table, size_t head, std::span<const std::byte> memory,
                                const AppendHead& append_head) {
  std::vector<int64_t> made;
  int64_t number = 0;
  for (size_t at = 0; at < table.size(); ++number) {
    const Row row = row_at(table, at, head, number);
    at += head + 3 * row.first.size();
    const auto [offset, dtype] = append_head(row, number, made);
    for (const auto list : {row.first, row.second, row.third}) append(made, list);
    made.push_back(state::address_in(memory, offset, dtype, row.third, number));
    append_contiguous_strides(made, row.third);
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

}  // namespace vescale_ckpt::share
