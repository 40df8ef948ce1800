#include "plan/group.h"

#include <algorithm>
#include <span>

#include "plan/error_texts.h"
#include "plan/row_check.h"
#include "plan/validate.h"

namespace vescale_ckpt::plan {
namespace {

std::vector<uint32_t> ranks_of(const Holder* begin, const Holder* end) {
  std::vector<uint32_t> ranks;
  for (const Holder* holder = begin; holder != end; ++holder) ranks.push_back(holder->rank);
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  return ranks;
}

}  // namespace

void Grouping::sort(uint64_t* places, Holder* holders, int64_t* dims, size_t rows, size_t words) {
  if (std::is_sorted(places, places + rows)) return;
  order_.resize(rows);
  for (size_t row = 0; row < rows; ++row) order_[row] = {places[row], static_cast<uint32_t>(row)};
  std::sort(order_.begin(), order_.end(),
            [](const Ordered& a, const Ordered& b) { return a.place != b.place ? a.place < b.place : a.row < b.row; });
  holders_copy_.assign(holders, holders + rows);
  dims_copy_.assign(dims, dims + rows * words);
  for (size_t i = 0; i < rows; ++i) {
    const size_t row = order_[i].row;
    places[i] = order_[i].place;
    holders[i] = holders_copy_[row];
    std::copy_n(dims_copy_.data() + row * words, words, dims + i * words);
  }
}

uint32_t Grouping::group(uint32_t number, std::string& fault) {
  const Layout::Class& facts = layout_.classes[number];
  const uint64_t base = rows_.begin[number];
  const size_t words = 2 * size_t{facts.ndim};
  uint64_t* places = rows_.places.data() + base;
  Holder* holders = rows_.holders.data() + base;
  int64_t* dims = rows_.dims.data() + rows_.dims_begin[number];
  uint32_t* counts = rows_.holders_of_chunk.data() + base;
  size_t rows = rows_.begin[number + 1] - base;
  sort(places, holders, dims, rows, words);

  const Boxes chunks{dims, facts.ndim};
  const auto text = [&](size_t chunk, const Holder* from, const Holder* to) {
    const std::span<const int64_t> offset(chunks.offset(chunk), facts.ndim), size(chunks.size(chunk), facts.ndim);
    const std::vector<uint32_t> ranks = ranks_of(from, to);
    return ranks_text(ranks) + (ranks.size() == 1 ? " has" : " have") + " offset " + tuple_text(offset) + " of size " +
           tuple_text(size);
  };
  const bool empty = places[0] == kEmptyChunk;
  if (!empty) {  // drops the empty chunks
    while (places[rows - 1] == kEmptyChunk) --rows;
  }

  uint32_t count = 0;
  size_t kept = 0;  // number of holders that are kept
  for (size_t row = 0; row < rows; ++row) {
    const int64_t* chunk = dims + row * words;
    if (row > 0 && places[row] == places[row - 1]) {
      const bool equal = std::equal(chunk, chunk + words, dims + (count - 1) * words);
      if (!equal && empty) continue;
      if (!equal) {
        fault = text(count - 1, holders + kept - counts[count - 1], holders + kept) + ", " +
                text(row, holders + row, holders + row + 1) + ": they overlap";
        return 0;
      }
      if (holders[row].rank == holders[kept - 1].rank) {
        if (empty) continue;
        fault = (facts.kind == state::ItemKind::object ? "rank " + std::to_string(holders[row].rank) + " has it"
                                                       : text(row, holders + row, holders + row + 1)) +
                " twice";
        return 0;
      }
      ++counts[count - 1];
    } else {
      std::copy(chunk, chunk + words, dims + count * words);
      counts[count++] = 1;
    }
    holders[kept++] = holders[row];
  }
  if (facts.kind == state::ItemKind::object) return count;

  const Tiling tiling = check_tiling(layout_.shape(facts), chunks, empty ? 0 : count);
  if (tiling.overlap) {
    const auto holders_text = [&](size_t chunk) {
      const Holder* from = holders;
      for (size_t before = 0; before < chunk; ++before) from += counts[before];
      return text(chunk, from, from + counts[chunk]);
    };
    fault = holders_text(tiling.overlap->first) + ", " + holders_text(tiling.overlap->second) + ": they overlap";
    return 0;
  }
  if (tiling.missing > 0 && covers_all_) {
    const bool exact = !tiling.hole_size.empty();
    fault = std::to_string(tiling.missing) + " elements are held by no rank" +
            (exact ? ", such as those at offset " + tuple_text(tiling.hole_offset) + " of size " +
                         tuple_text(tiling.hole_size)
                   : "") +
            " (" + ranks_text(ranks_of(holders, holders + kept)) + " hold the rest)";
    return 0;
  }
  return count;
}

}  // namespace vescale_ckpt::plan
