#include "share/split_reads.h"

#include <algorithm>

#include "base/append.h"
#include "base/crc32.h"
#include "base/error.h"
#include "share/route_needs.h"

namespace vescale_ckpt::share {
namespace {

// Calls `use` with each row, as a Need without rank and file.
template <typename Use>
void for_each_row(std::span<const int64_t> reads, const Use& use) {
  for (size_t at = 0; at < reads.size();) {
    const Need need{0, 0, read_row_at(reads, at, 0)};
    if (need.record_offset() < 0) throw Error::invalid("a rank's reads are malformed");
    use(need);
    at += need.row.size();
  }
}

}  // namespace

int64_t last_record(std::span<const int64_t> reads) {
  int64_t last = 0;
  for_each_row(reads, [&](const Need& need) { last = std::max(last, need.record_offset()); });
  return last;
}

std::vector<std::vector<int64_t>> split_reads(std::span<const int64_t> reads, std::span<const std::string> files,
                                              uint32_t parts, uint64_t range_bytes) {
  if (parts == 0 || range_bytes == 0) throw Error::invalid("reads are split into one part or more");
  std::vector<uint64_t> first;  // part of each file: by its name, as ranks number files differently
  for (const std::string& name : files) first.push_back(crc32(0, name.data(), name.size()));
  std::vector<std::vector<int64_t>> result(parts);
  for_each_row(reads, [&](const Need& need) {
    const auto file = static_cast<uint64_t>(need.row[1]);
    if (file >= first.size()) throw Error::invalid("a rank's reads are malformed");
    const uint64_t number = first[file] + static_cast<uint64_t>(need.record_offset()) / range_bytes;
    append(result[number % parts], need.row);
  });
  return result;
}

}  // namespace vescale_ckpt::share
