#include "hf/node_ranges.h"

#include <algorithm>

#include "base/error.h"
#include "base/memory.h"
#include "format/checksum_table.h"

namespace vescale_ckpt::hf {
namespace {

struct Stretch {
  uint32_t file;
  uint64_t begin, end;
};

void add(std::vector<Stretch>& stretches, const Stretch& next) {
  if (next.begin >= next.end) return;
  if (!stretches.empty() && stretches.back().file == next.file && next.begin <= stretches.back().end) {
    stretches.back().end = std::max(stretches.back().end, next.end);
  } else {
    stretches.push_back(next);
  }
}

// Adds what is wanted of spans that follow each other, all of one node. Their first and last blocks may have bytes of
// others.
void add_wanted(std::span<const HeldSpan> spans, std::vector<Stretch>& stretches) {
  const uint64_t begin = align_up(spans.front().begin, kBlock), end = align_down(spans.back().end, kBlock);
  const auto add_within = [&](uint64_t from, uint64_t to) {
    add(stretches,
        {spans.front().file, std::max(align_down(from, kBlock), begin), std::min(align_up(to, kBlock), end)});
  };
  for (size_t i = 0; i < spans.size(); ++i) {
    if (spans[i].rank == HeldSpan::kNobody) {
      add_within(spans[i].begin, spans[i].end);
    } else if (i != 0 && spans[i - 1].rank != spans[i].rank) {
      add_within(spans[i].begin, spans[i].begin);
    }
  }
}

}  // namespace

std::vector<std::vector<NodeRange>> choose_node_ranges(std::span<const HeldSpan> spans, std::span<const uint32_t> ranks,
                                                       uint64_t window_bytes, uint64_t least_bytes) {
  if (window_bytes == 0 || window_bytes % kBlock != 0) throw Error::invalid("a window is of whole blocks");
  std::vector<std::vector<Stretch>> wanted(ranks.size());
  for (size_t first = 0, next = 0; first < spans.size(); first = next) {
    const HeldSpan& span = spans[first];
    next = first + 1;
    while (next < spans.size() && spans[next].node == span.node && spans[next].file == span.file &&
           spans[next].begin == spans[next - 1].end) {
      ++next;
    }
    if (span.node == HeldSpan::kNobody || ranks[static_cast<size_t>(span.node)] < 2) continue;
    add_wanted(spans.subspan(first, next - first), wanted[static_cast<size_t>(span.node)]);
  }

  std::vector<std::vector<NodeRange>> chosen(ranks.size());
  for (size_t node = 0; node < ranks.size(); ++node) {
    uint64_t bytes = 0;
    for (const Stretch& stretch : wanted[node]) bytes += stretch.end - stretch.begin;
    if (bytes < std::max<uint64_t>(least_bytes, 1)) continue;
    // Whole cells of checksums, so that two writers seldom have bytes of one.
    const uint64_t share = align_up((bytes + ranks[node] - 1) / ranks[node], format::kChecksumBlock);
    uint64_t done = 0;
    for (const Stretch& stretch : wanted[node]) {
      for (uint64_t begin = stretch.begin; begin < stretch.end;) {
        const uint64_t place = done % share, at = place % window_bytes;
        const uint64_t size = std::min({stretch.end - begin, share - place, window_bytes - at});
        chosen[node].push_back({stretch.file, begin, begin + size, static_cast<uint32_t>(done / share),
                                static_cast<uint32_t>(place / window_bytes), at});
        begin += size;
        done += size;
      }
    }
  }
  return chosen;
}

std::vector<int64_t> range_rows(std::span<const NodeRange> ranges) {
  std::vector<int64_t> table;
  table.reserve(ranges.size() * NodeRange::kWords);
  for (const NodeRange& range : ranges) {
    table.insert(table.end(), {range.file, static_cast<int64_t>(range.begin), static_cast<int64_t>(range.end),
                               range.writer, range.round, static_cast<int64_t>(range.at)});
  }
  return table;
}

std::vector<NodeRange> choose_stream_ranges(std::span<const uint64_t> file_bytes, uint32_t ranks,
                                            uint64_t window_bytes) {
  if (ranks == 0 || window_bytes == 0 || window_bytes % kBlock != 0)
    throw Error::invalid("a window is of whole blocks");
  std::vector<NodeRange> chosen;
  std::vector<uint64_t> done(ranks);
  for (uint32_t file = 0; file < file_bytes.size(); ++file) {
    const auto writer = static_cast<uint32_t>(std::ranges::min_element(done) - done.begin());
    const uint64_t end = align_up(file_bytes[file], kBlock);
    for (uint64_t begin = 0; begin < end;) {
      const uint64_t at = done[writer] % window_bytes, size = std::min(end - begin, window_bytes - at);
      chosen.push_back({file, begin, begin + size, writer, static_cast<uint32_t>(done[writer] / window_bytes), at});
      begin += size;
      done[writer] += size;
    }
  }
  return chosen;
}

}  // namespace vescale_ckpt::hf
