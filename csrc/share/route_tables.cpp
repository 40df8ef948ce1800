#include "share/route_tables.h"

#include "base/error.h"
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

void append(std::vector<int64_t>& to, std::span<const int64_t> words) {
  to.insert(to.end(), words.begin(), words.end());
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

}  // namespace

std::vector<int64_t> make_staging_table(std::span<const int64_t> staged, std::span<const std::byte> memory) {
  std::vector<int64_t> table;
  int64_t number = 0;
  for (size_t at = 0; at < staged.size(); ++number) {
    const Row row = row_at(staged, at, kStagedHead, number);
    at += kStagedHead + 3 * row.first.size();
    append(table, row.head.subspan(2));
    append(table, row.first);
    append(table, row.second);
    append(table, row.third);
    table.push_back(state::address_in(memory, row.head[0], row.head[6], row.third, number));
    append_contiguous_strides(table, row.third);
  }
  return table;
}

std::vector<int64_t> make_pack_table(std::span<const int64_t> packs, std::span<const std::byte> memory) {
  std::vector<int64_t> table;
  int64_t number = 0;
  for (size_t at = 0; at < packs.size(); ++number) {
    const Row row = row_at(packs, at, kPackHead, number);
    at += kPackHead + 3 * row.first.size();
    const int64_t dtype = row.head[2];
    table.push_back(dtype);
    table.push_back(state::address_in(memory, row.head[0], dtype, row.first, number));
    table.push_back(row.head[3]);
    append(table, row.first);
    append(table, row.second);
    append(table, row.third);
    table.push_back(state::address_in(memory, row.head[1], dtype, row.third, number));
    append_contiguous_strides(table, row.third);
  }
  return table;
}

}  // namespace vescale_ckpt::share
