#include "write/shared_writer.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <utility>

#include "base/error.h"
#include "base/memory.h"
#include "base/workers.h"
#include "io/table_cursor.h"
#include "write/writer.h"

namespace vescale_ckpt::write {
namespace {

// How much a thread copies or sums at once, at most.
constexpr uint64_t kStep = 1 << 20;
static_assert(kStep % format::kChecksumBlock == 0);

// Calls `emit(begin, end)` for parts of a range of a file.
template <typename Emit>
void by_steps(uint64_t begin, uint64_t end, const Emit& emit) {
  for (uint64_t at = begin; at < end;) {
    const uint64_t next = std::min(end, align_down(at, kStep) + kStep);
    emit(at, next);
    at = next;
  }
}

}  // namespace

SharedWriter::SharedWriter(std::vector<std::string> paths, std::span<const int64_t> targets,
                           const io::EngineOptions& options)
    : options_(usable_for_writing(options)),
      paths_(std::move(paths)),
      table_(targets.begin(), targets.end()),
      files_(paths_.size()),
      remote_(!paths_.empty() && io::is_remote(paths_.front())),
      control_(paths_.empty() ? std::string() : paths_.front(), options.bytes_per_second) {
  uint64_t blocks = 0;
  for (io::TableCursor cursor(table_); !cursor.at_end(); cursor.next_row()) {
    const uint64_t file = cursor.size(), begin = cursor.size();
    const uint32_t dtype = cursor.dtype();
    const uint64_t dims = cursor.size();
    if (file >= paths_.size() || dims > table_.size()) throw Error::invalid("no such file in the table", cursor.row());
    Target target{static_cast<uint32_t>(file), dtype, begin, 0, blocks, cursor.take(3 * dims)};
    blocks += cursor.made_of_row([&] {
      const uint64_t bytes = format::tensor_bytes(format::dtypes()[dtype], target.sizes(0));
      if (__builtin_add_overflow(begin, bytes, &target.end)) throw Error::invalid("a tensor's place overflows");
      const std::vector<int64_t> strides(dims);
      const io::Box box(format::dtypes()[dtype].item_bytes, target.sizes(0), target.sizes(1), target.sizes(2), strides);
      return format::cells(begin + box.begin(), begin + box.end());
    });
    targets_.push_back(target);
  }
  blocks_.resize(blocks);
}

io::File* SharedWriter::opened(uint32_t file) {
  if (!files_[file]) files_[file] = io::File::open_shared(paths_[file], options_.widest);
  return files_[file].get();
}

TensorPlace SharedWriter::place_of(const Target& target, const io::Box& box, io::File* file) {
  const uint64_t begin = target.begin + box.begin(), end = target.begin + box.end();
  return {file, target.begin, target.end, begin / format::kChecksumBlock,
          std::span(blocks_).subspan(target.first_block, format::cells(begin, end))};
}

void SharedWriter::write(std::span<const int64_t> table, std::span<const int64_t> rows) {
  std::deque<io::Box> boxes;
  std::vector<TileSource> sources;
  sources.reserve(rows.size());
  io::TableCursor cursor(table);
  for (; !cursor.at_end(); cursor.next_row()) {
    const uint32_t dtype = cursor.dtype();
    const std::byte* data = cursor.address();
    const uint64_t dims = cursor.size();
    const auto sizes = cursor.take(dims), strides = cursor.take(dims);
    const auto at = static_cast<size_t>(cursor.row());
    if (at >= rows.size() || rows[at] < 0 || static_cast<uint64_t>(rows[at]) >= targets_.size()) {
      throw Error::invalid("no such box in the layout", cursor.row());
    }
    const Target& target = targets_[static_cast<size_t>(rows[at])];
    if (dtype != target.dtype || !std::ranges::equal(sizes, target.sizes(2))) {
      throw Error::invalid("a tensor is not what the layout was made for", cursor.row());
    }
    io::Box box(format::dtypes()[dtype].item_bytes, target.sizes(0), target.sizes(1), sizes, strides);
    if (box.bytes() == 0) continue;
    const auto joined = ranges_in(target.file, target.begin + box.begin(), target.begin + box.end());
    const io::Box& kept = (joined.empty() ? boxes : boxes_).emplace_back(std::move(box));
    TileSource source{place_of(target, kept, remote_ ? nullptr : opened(target.file)), data, &kept};
    source.from = kept.begin();
    if (!joined.empty()) held_.push_back({source, target.file});
    for (const Range& range : joined) {  // what lies before it and behind the one before
      source.to = std::max(range.begin, target.begin) - target.begin;
      if (source.from < source.to) sources.push_back(source);
      source.from = range.end - target.begin;
    }
    source.to = UINT64_MAX;
    if (source.from < kept.end()) sources.push_back(source);
    if (remote_ && !sources.empty()) {
      throw Error::invalid("several writers cannot fill one file of an object store", cursor.row());
    }
  }
  if (static_cast<size_t>(cursor.row()) != rows.size()) throw Error::invalid("as many boxes as tensors are wanted");
  write_all(sources);
}

void SharedWriter::write_all(std::vector<TileSource>& sources) {
  const auto place = [](const TileSource& source) {
    return std::pair(source.place.file, source.place.begin + std::max(source.box->begin(), source.from));
  };
  std::ranges::sort(sources, {}, place);
  write_tiles(sources, TileEdges::shared, options_, control_, stats_);
}

void SharedWriter::join(std::span<const int64_t> ranges, uint32_t writer, uint64_t window_bytes, size_t first_target) {
  std::vector<Range> found;
  io::TableCursor cursor(ranges);
  for (; !cursor.at_end(); cursor.next_row()) {
    Range range{};
    const uint64_t file = cursor.size();
    range.file = static_cast<uint32_t>(file);
    range.begin = cursor.size();
    range.end = cursor.size();
    range.writer = cursor.size();
    range.round = cursor.size();
    range.at = cursor.size();
    const bool blocks = range.begin % kBlock == 0 && range.end % kBlock == 0 && range.at % kBlock == 0;
    if (file >= paths_.size() || range.begin >= range.end || !blocks || range.at > window_bytes ||
        range.end - range.begin > window_bytes - range.at || range.round >= ranges.size()) {
      throw Error::invalid("no such range of a window", cursor.row());
    }
    writers_ = std::max(writers_, range.writer + 1);
    found.push_back(range);
  }
  std::ranges::sort(found, {}, &Range::place);
  ranges_ = std::move(found);
  for (size_t number = first_target; number < targets_.size(); ++number) {
    const Target& target = targets_[number];
    if (target.boxes.size() != 3 || format::dtypes()[target.dtype].item_bytes != 1) {
      throw Error::invalid("a target that is not of bytes", static_cast<int64_t>(number));
    }
    const uint64_t begin = target.begin + static_cast<uint64_t>(target.sizes(1)[0]);
    const uint64_t end = begin + static_cast<uint64_t>(target.sizes(2)[0]);
    const auto holding = ranges_in(target.file, begin, end);
    if (holding.size() != 1 || holding[0].begin > begin || holding[0].end < end || holding[0].writer != writer) {
      throw Error::invalid("a target that is not in a range of this writer", static_cast<int64_t>(number));
    }
    sent_.resize(std::max<size_t>(sent_.size(), holding[0].round + 1));
    sent_[holding[0].round].push_back({number, holding.data()});
  }
}

io::Box SharedWriter::box_of(const Target& target) {
  constexpr int64_t kStride = 1;
  return {1, target.sizes(0), target.sizes(1), target.sizes(2), std::span(&kStride, 1)};
}

std::span<const SharedWriter::Range> SharedWriter::ranges_in(uint32_t file, uint64_t begin, uint64_t end) const {
  const auto last = std::ranges::lower_bound(ranges_, std::pair(file, end), {}, &Range::place);
  auto first = std::ranges::upper_bound(ranges_.begin(), last, std::pair(file, begin), {}, &Range::place);
  if (first != ranges_.begin() && (first - 1)->file == file && (first - 1)->end > begin) --first;
  return {first, last};
}

void SharedWriter::fill(uint64_t round, std::span<std::byte* const> windows) const {
  if (windows.size() < writers_) throw Error::invalid("a window of each writer is wanted");
  struct Step {
    const Held* held;
    const Range* range;
    uint64_t begin, end;  // in the file
  };
  std::vector<Step> steps;
  for (const Held& held : held_) {
    for (const Range& range : ranges_in(held.file, held.begin(), held.end())) {
      if (range.round != round || windows[range.writer] == nullptr) continue;
      by_steps(std::max(range.begin, held.begin()), std::min(range.end, held.end()),
               [&](uint64_t begin, uint64_t end) { steps.push_back({&held, &range, begin, end}); });
    }
  }
  in_parallel(steps.size(), [&](size_t number) {
    const Step& step = steps[number];
    const TileSource& source = step.held->source;
    std::byte* out = windows[step.range->writer] + step.range->at + (step.begin - step.range->begin);
    source.box->gather(out, step.begin - source.place.begin, step.end - source.place.begin, source.data);
  });
}

void SharedWriter::in_parallel(size_t count, const std::function<void(size_t)>& body) const {
  if (count == 0) return;
  std::atomic<size_t> taken{0};
  const auto work = [&](const std::atomic<bool>& stop) {
    for (size_t number = taken++; number < count && !stop; number = taken++) {
      control_.check();
      body(number);
    }
  };
  run_workers(static_cast<unsigned>(std::min<size_t>(options_.threads, count)), work, options_.niceness);
}

std::vector<uint32_t> SharedWriter::sum() {
  struct Step {
    const TileSource* source;
    uint64_t begin, end;  // in the tensor
  };
  std::vector<Step> steps;
  for (const Held& held : held_) {
    by_steps(held.begin(), held.end(), [&](uint64_t begin, uint64_t end) {
      const uint64_t first = held.source.place.begin;
      steps.push_back({&held.source, begin - first, end - first});
    });
  }
  in_parallel(steps.size(), [&](size_t number) {
    const auto& [source, begin, end] = steps[number];
    const TensorPlace& place = source->place;
    const io::Box& box = *source->box;
    if (box.dense()) {
      add_checksum(place, place.begin + begin, source->data + (begin - box.begin()), end - begin, nullptr);
      return;
    }
    const auto scratch = std::make_unique_for_overwrite<std::byte[]>(end - begin);
    box.gather(scratch.get(), begin, end, source->data);
    box.runs(begin, end, [&](uint64_t at, int64_t, uint64_t bytes) {
      add_checksum(place, place.begin + at, scratch.get() + (at - begin), bytes, nullptr);
    });
  });
  std::vector<uint32_t> summed = blocks_;
  std::ranges::fill(blocks_, 0);
  return summed;
}

void SharedWriter::sum_window(uint64_t round, const std::byte* window) {
  if (round >= sent_.size()) return;
  struct Step {
    TensorPlace place;
    uint64_t at;  // in the file
    const std::byte* data;
    uint64_t bytes;
  };
  std::vector<Step> steps;
  for (const Sent& sent : sent_[round]) {
    const Target& target = targets_[sent.target];
    const io::Box box = box_of(target);
    const TensorPlace place = place_of(target, box, nullptr);
    by_steps(target.begin + box.begin(), target.begin + box.end(), [&](uint64_t begin, uint64_t end) {
      steps.push_back({place, begin, window + sent.range->at + (begin - sent.range->begin), end - begin});
    });
  }
  in_parallel(steps.size(), [&](size_t number) {
    const Step& step = steps[number];
    add_checksum(step.place, step.at, step.data, step.bytes, nullptr);
  });
}

void SharedWriter::send(uint64_t round, const std::byte* window) {
  if (round >= sent_.size()) return;
  std::deque<io::Box> boxes;
  std::vector<TileSource> sources;
  for (const Sent& sent : sent_[round]) {
    const Target& target = targets_[sent.target];
    const io::Box& box = boxes.emplace_back(box_of(target));
    const uint64_t at = sent.range->at + (target.begin + box.begin() - sent.range->begin);
    sources.push_back({place_of(target, box, opened(target.file)), window + at, &box});
  }
  write_all(sources);
}

std::span<const uint32_t> SharedWriter::finish(bool sync) {
  control_.check();
  for (std::unique_ptr<io::File>& file : files_) {
    if (file && sync) file->sync();
    if (file) file->close();
    file.reset();
  }
  control_.check();  // syncing may have taken long
  return blocks_;
}

}  // namespace vescale_ckpt::write
