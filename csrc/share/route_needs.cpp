#include "share/route_pieces.h"

#include <algorithm>
#include <map>
#include <string>
#include <tuple>
#include <unordered_map>

#include "base/crc32.h"
#include "base/error.h"
#include "format/torch_record.h"
#include "state/inventory.h"
#include "state/tables.h"

namespace vescale_ckpt::share {
namespace {

void check(const Need& need, uint64_t files) {
  const auto malformed = [&need] { return Error::invalid("a rank's reads are malformed", need.rank); };
  if (need.row[1] < 0 || static_cast<uint64_t>(need.row[1]) >= files) throw malformed();
  if (need.dtype() < 0 || static_cast<uint64_t>(need.dtype()) >= format::dtypes().size()) throw malformed();
  uint64_t bytes = item_bytes(need);
  for (size_t dim = 0; dim < need.dims(); ++dim) {
    const int64_t chunk = need.chunk()[dim], offset = need.box_offset()[dim], size = need.box_size()[dim];
    if (chunk < 0 || offset < 0 || size < 0 || offset > chunk || size > chunk - offset) throw malformed();
    if (__builtin_mul_overflow(bytes, static_cast<uint64_t>(std::max<int64_t>(chunk, 1)), &bytes)) throw malformed();
  }
  if (bytes > uint64_t{1} << 62) throw malformed();
}

// Returns the row at a word of a rank's table; checks its length only.
std::span<const int64_t> read_row_at(std::span<const int64_t> reads, size_t at, uint32_t rank) {
  const auto malformed = [rank] { return Error::invalid("a rank's reads are malformed", rank); };
  if (reads.size() - at < Need::kHead) throw malformed();
  const int64_t dims = reads[at + Need::kHead - 1];
  if (dims < 0 || dims > state::kMostDims) throw malformed();
  const size_t words = Need::kHead + 4 * static_cast<size_t>(dims);
  if (reads.size() - at < words) throw malformed();
  return reads.subspan(at, words);
}

}  // namespace

uint64_t item_bytes(const Need& need) {
  return format::dtypes()[static_cast<size_t>(need.dtype())].item_bytes;
}

std::vector<Replicas> replicas_among(std::span<const RankReads> ranks, std::span<const uint32_t> members) {
  std::vector<Replicas> groups;
  std::map<std::tuple<const void*, size_t, const void*>, size_t> by_tables;
  for (const uint32_t rank : members) {
    const RankReads& of = ranks[rank];
    const std::tuple tables(of.reads.data(), of.reads.size(), of.files.data());
    const auto [found, is_new] = by_tables.emplace(tables, groups.size());
    if (is_new) groups.emplace_back();
    groups[found->second].ranks.push_back(rank);
  }
  return groups;
}

Needs needs_of(std::span<const RankReads> ranks, std::span<const uint32_t> members, bool numbered) {
  std::unordered_map<std::string, uint32_t> files;
  Needs needs{replicas_among(ranks, members), {}};
  for (const Replicas& replicas : needs.replicas) {
    const uint32_t rank = replicas.ranks.front();
    std::vector<uint32_t> numbers;
    for (const std::string& name : ranks[rank].files) {
      numbers.push_back(files.emplace(name, static_cast<uint32_t>(files.size())).first->second);
    }
    const std::span<const int64_t> reads = ranks[rank].reads;
    for (size_t at = 0; at < reads.size();) {
      Need need{rank, 0, read_row_at(reads, at, rank), &replicas};
      at += need.row.size();
      check(need, numbered ? UINT32_MAX : numbers.size());
      need.file = numbered ? static_cast<uint32_t>(need.row[1]) : numbers[static_cast<size_t>(need.row[1])];
      needs.rows.push_back(need);
    }
  }
  std::ranges::stable_sort(needs.rows, [](const Need& left, const Need& right) {
    return std::tuple(left.file, left.record_offset(), left.rank) <
           std::tuple(right.file, right.record_offset(), right.rank);
  });
  return needs;
}

std::vector<std::vector<int64_t>> split_reads(std::span<const int64_t> reads, std::span<const std::string> files,
                                              uint32_t parts, uint64_t range_bytes) {
  if (parts == 0 || range_bytes == 0) throw Error::invalid("reads are split into one part or more");
  std::vector<uint32_t> names;  // hashed: ranks number files differently
  for (const std::string& name : files) names.push_back(crc32(0, name.data(), name.size()));
  std::vector<std::vector<int64_t>> result(parts);
  for (size_t at = 0; at < reads.size();) {
    const Need need{0, 0, read_row_at(reads, at, 0)};
    const auto file = static_cast<uint64_t>(need.row[1]);
    if (file >= names.size() || need.record_offset() < 0) throw Error::invalid("a rank's reads are malformed");
    // Hashed, too: records of one size may begin at every n-th range.
    const uint64_t range = static_cast<uint64_t>(need.record_offset()) / range_bytes;
    state::append(result[crc32(names[file], &range, sizeof range) % parts], need.row);
    at += need.row.size();
  }
  return result;
}

}  // namespace vescale_ckpt::share
