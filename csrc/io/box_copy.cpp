#include "io/box_copy.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "base/workers.h"
#include "format/torch_record.h"
#include "io/table_cursor.h"

namespace vescale_ckpt::io {
namespace {

// A step of a thread: large enough that threads do not meet, small enough that all have some.
constexpr uint64_t kStep = 1 << 20;

struct Step {
  size_t copy;  // the first of those in it, or of which it is a part
  size_t end;
  uint64_t from, to;  // range of the body; a single copy's
};

std::vector<Step> steps_of(std::span<const BoxCopy> copies) {
  std::vector<Step> steps;
  uint64_t bytes = 0;  // in the last step, if more copies may join it
  for (size_t i = 0; i < copies.size(); ++i) {
    const Box& box = copies[i].box;
    if (box.bytes() == 0) continue;
    if (box.bytes() > kStep) {
      // Cut where the bytes are read: a part of the piece has about its share of the box.
      const uint64_t span = box.end() - box.begin(), parts = box.bytes() / kStep + 1;
      for (uint64_t part = 0; part < parts; ++part) {
        const uint64_t from = box.begin() + span / parts * part;
        steps.push_back({i, i + 1, from, part + 1 == parts ? box.end() : from + span / parts});
      }
      bytes = 0;
    } else if (bytes != 0 && bytes + box.bytes() <= kStep) {
      steps.back().end = i + 1;
      bytes += box.bytes();
    } else {
      steps.push_back({i, i + 1, 0, UINT64_MAX});
      bytes = box.bytes();
    }
  }
  return steps;
}

void copy(const BoxCopy& copy, uint64_t from, uint64_t to, CopyWay way) {
  from = std::max(from, copy.box.begin());
  to = std::min(to, copy.box.end());
  if (way == CopyWay::scatter) {
    copy.box.scatter(copy.piece + from, from, to, copy.memory);
  } else {
    copy.box.gather(copy.piece + from, from, to, copy.memory);
  }
}

}  // namespace

void copy_boxes(std::span<const BoxCopy> copies, unsigned threads, CopyWay way) {
  const std::vector<Step> steps = steps_of(copies);
  if (steps.empty()) return;
  std::atomic<size_t> next{0};
  run_workers(static_cast<unsigned>(std::min<size_t>(threads, steps.size())), [&](const std::atomic<bool>&) {
    for (size_t number = next++; number < steps.size(); number = next++) {
      const Step& step = steps[number];
      for (size_t i = step.copy; i < step.end; ++i) copy(copies[i], step.from, step.to, way);
    }
  });
}

std::vector<BoxCopy> parse_copy_table(std::span<const int64_t> table) {
  std::vector<BoxCopy> copies;
  for (TableCursor cursor(table); !cursor.at_end(); cursor.next_row()) {
    const uint32_t dtype = cursor.dtype();
    std::byte* piece = cursor.address();
    const uint64_t dims = cursor.size();
    const auto sizes = cursor.take(dims), offsets = cursor.take(dims), lengths = cursor.take(dims);
    std::byte* memory = cursor.address();
    const auto strides = cursor.take(dims);
    copies.push_back(cursor.made_of_row([&]() -> BoxCopy {
      format::tensor_bytes(format::dtypes()[dtype], sizes);  // throws for a shape that overflows
      return {Box(format::dtypes()[dtype].item_bytes, sizes, offsets, lengths, strides), piece, memory};
    }));
  }
  return copies;
}

}  // namespace vescale_ckpt::io
