#include "stage/snapshot_layout.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "base/memory.h"

namespace vescale_ckpt::stage {
namespace {

class Arrangement {
 public:
  explicit Arrangement(std::span<const write::RecordSource> sources) : sources_(sources) {
    contiguous_.reserve(sources.size());
    for (size_t row = 0; row < sources.size(); ++row) {
      if (sources[row].bytes == 0) continue;
      if (sources[row].strided) {
        strided_.push_back(row);
      } else {
        contiguous_.emplace_back(sources[row].data, row);
      }
    }
    if (!std::ranges::is_sorted(contiguous_)) std::ranges::sort(contiguous_);
    std::sort(strided_.begin(), strided_.end(), [&](size_t a, size_t b) {
      if (sources[a].data != sources[b].data) return sources[a].data < sources[b].data;
      return std::tie(*sources[a].strided, a) < std::tie(*sources[b].strided, b);
    });
  }

  // Makes the layout of the rows from `first` on.
  SnapshotLayout tail(size_t first) const {
    std::vector<Union> unions;
    std::vector<size_t> union_of(sources_.size() - first, kNone);
    unions.reserve(contiguous_.size() + strided_.size());
    for (const auto& [data, row] : contiguous_) {
      if (row < first) continue;
      const write::RecordSource& source = sources_[row];
      if (unions.empty() || source.data >= unions.back().begin + unions.back().bytes) {
        unions.push_back({source.data, 0, row});
      }
      Union& last = unions.back();
      last.bytes = std::max(last.bytes, static_cast<uint64_t>(source.data - last.begin) + source.bytes);
      if (source.bytes > sources_[last.anchor].bytes) last.anchor = row;
      union_of[row - first] = unions.size() - 1;
    }
    for (const size_t row : strided_) {
      if (row < first) continue;
      const write::RecordSource& source = sources_[row];
      const bool again = !unions.empty() && sources_[unions.back().anchor].strided &&
                         unions.back().begin == source.data &&
                         *sources_[unions.back().anchor].strided == *source.strided;
      if (!again) unions.push_back({source.data, source.bytes, row});
      union_of[row - first] = unions.size() - 1;
    }
    return place(first, unions, union_of);
  }

 private:
  static constexpr size_t kNone = std::numeric_limits<size_t>::max();

  struct Union {
    const std::byte* begin;
    uint64_t bytes;
    size_t anchor;  // its largest row, which decides the alignment
    uint64_t offset = SnapshotLayout::kNowhere;
  };

  // Copies are in the order of rows, as in the file: neighbours are written together.
  SnapshotLayout place(size_t first, std::vector<Union>& unions, const std::vector<size_t>& union_of) const {
    SnapshotLayout layout;
    layout.first = first;
    layout.offsets.reserve(union_of.size());
    layout.copies.reserve(unions.size());
    for (size_t row = first; row < sources_.size(); ++row) {
      if (union_of[row - first] == kNone) {
        layout.offsets.push_back(SnapshotLayout::kNowhere);
        continue;
      }
      Union& one = unions[union_of[row - first]];
      if (one.offset == SnapshotLayout::kNowhere) {
        const write::RecordSource& anchor = sources_[one.anchor];
        const auto before = static_cast<uint64_t>(anchor.data - one.begin);
        const uint64_t free = align_up(layout.memory_bytes, SnapshotLayout::kAlignment);
        // A large body is placed so that the writer can write it in place.
        one.offset = anchor.bytes < io::kLargeBody ? free : next_congruent(free + before, write::kTorchOffset) - before;
        layout.memory_bytes = one.offset + one.bytes;
        layout.copied_bytes += one.bytes;
        layout.copies.push_back(
            {one.begin, one.bytes, one.offset, anchor.strided ? &*anchor.strided : nullptr, one.anchor});
      }
      layout.offsets.push_back(one.offset + static_cast<uint64_t>(sources_[row].data - one.begin));
    }
    return layout;
  }

  const std::span<const write::RecordSource> sources_;
  // Rows with bytes, sorted by address.
  std::vector<std::pair<const std::byte*, size_t>> contiguous_;
  std::vector<size_t> strided_;
};

}  // namespace

SnapshotLayout lay_out_snapshot(std::span<const write::RecordSource> sources, uint64_t room) {
  const Arrangement arrangement(sources);
  SnapshotLayout all = arrangement.tail(0);
  if (all.memory_bytes <= room) return all;
  // Fewer rows need less memory. Rows may share bytes, so the size is known only after an attempt.
  size_t too_many = 0, fits = sources.size();
  while (fits - too_many > 1) {
    const size_t middle = too_many + (fits - too_many) / 2;
    (arrangement.tail(middle).memory_bytes <= room ? fits : too_many) = middle;
  }
  return arrangement.tail(fits);
}

}  // namespace vescale_ckpt::stage
