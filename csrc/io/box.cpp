#include "io/box.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/error.h"
#include "base/workers.h"
#include "format/torch_record.h"
#include "io/table_cursor.h"

namespace vescale_ckpt::io {
namespace {

// Equal copies at two strides. The sizes of elements get code of their own: a call to memcpy an element is ten times
// slower.
template <size_t kBytes>
void copy_each(std::byte* to, int64_t to_stride, const std::byte* from, int64_t from_stride, uint64_t count) {
  for (uint64_t i = 0; i < count; ++i, to += to_stride, from += from_stride) std::memcpy(to, from, kBytes);
}

void copy_runs(std::byte* to, int64_t to_stride, const std::byte* from, int64_t from_stride, uint64_t count,
               uint64_t run) {
  switch (run) {
    case 1:
      return copy_each<1>(to, to_stride, from, from_stride, count);
    case 2:
      return copy_each<2>(to, to_stride, from, from_stride, count);
    case 4:
      return copy_each<4>(to, to_stride, from, from_stride, count);
    case 8:
      return copy_each<8>(to, to_stride, from, from_stride, count);
    case 16:
      return copy_each<16>(to, to_stride, from, from_stride, count);
    default:
      for (uint64_t i = 0; i < count; ++i, to += to_stride, from += from_stride) std::memcpy(to, from, run);
  }
}

}  // namespace

Box::Box(uint32_t item_bytes, std::span<const int64_t> chunk_sizes, std::span<const int64_t> box_offsets,
         std::span<const int64_t> box_sizes, std::span<const int64_t> memory_strides)
    : run_(item_bytes), bytes_(item_bytes) {
  uint64_t body_stride = item_bytes;
  uint64_t last = 0;  // body offset of the box's last element
  for (size_t dim = chunk_sizes.size(); dim-- > 0;) {
    const int64_t offset = box_offsets[dim], size = box_sizes[dim], limit = chunk_sizes[dim];
    if (offset < 0 || size < 0 || limit < 0 || offset > limit || size > limit - offset) {
      throw Error::invalid("a box of " + std::to_string(size) + " at " + std::to_string(offset) +
                           " leaves its chunk of " + std::to_string(limit) + " in dimension " + std::to_string(dim));
    }
    whole_ = whole_ && size == limit;
    const auto count = static_cast<uint64_t>(size);
    bytes_ *= count;
    begin_ += static_cast<uint64_t>(offset) * body_stride;
    last += (count == 0 ? 0 : count - 1) * body_stride;
    if (count > 1) {
      int64_t memory_stride = 0;
      if (__builtin_mul_overflow(memory_strides[dim], static_cast<int64_t>(item_bytes), &memory_stride)) {
        throw Error::invalid("a stride of " + std::to_string(memory_strides[dim]) + " elements overflows");
      }
      int64_t covered = 0;  // what the dimension inside covers in memory
      const bool joins =
          !dims_.empty() && body_stride == dims_.back().body_stride * dims_.back().count &&
          !__builtin_mul_overflow(dims_.back().memory_stride, static_cast<int64_t>(dims_.back().count), &covered) &&
          memory_stride == covered;
      if (dims_.empty() && body_stride == run_ && memory_stride == static_cast<int64_t>(run_)) {
        run_ *= count;
      } else if (joins) {
        dims_.back().count *= count;
      } else {
        dims_.push_back({count, body_stride, memory_stride});
      }
    }
    body_stride *= static_cast<uint64_t>(limit);
  }
  std::reverse(dims_.begin(), dims_.end());
  end_ = begin_ + last + item_bytes;
  if (bytes_ == 0) {
    end_ = begin_;
    dims_.clear();
    run_ = 0;
  }
}

Box Box::in_larger(uint64_t bytes) const {
  Box box = *this;
  box.begin_ += bytes;
  box.end_ += bytes;
  box.whole_ = false;
  return box;
}

// Runs come in rising body order, because the body is row-major and the box lies inside it. `copy` is called with
// (body offset, memory offset, bytes, count, body stride, memory stride).
template <typename Copy>
void Box::visit(uint64_t begin, uint64_t end, const Copy& copy) const {
  begin = std::max(begin, begin_);
  end = std::min(end, end_);
  if (begin >= end) return;

  // The last run that starts at or before `begin`.
  std::vector<uint64_t> index(dims_.size());
  uint64_t rest = begin - begin_;
  int64_t memory = 0;
  uint64_t body = begin_;
  for (size_t dim = 0; dim < dims_.size(); ++dim) {
    const Dim& d = dims_[dim];
    index[dim] = std::min(rest / d.body_stride, d.count - 1);
    rest -= index[dim] * d.body_stride;
    body += index[dim] * d.body_stride;
    memory += static_cast<int64_t>(index[dim]) * d.memory_stride;
  }

  const size_t depth = dims_.size();
  while (body < end) {
    const uint64_t from = std::max(body, begin), to = std::min(body + run_, end);
    const bool partial = from != body || to != body + run_;
    if (partial || depth == 0) {
      // The first run may end before `begin`.
      if (from < to) copy(from, memory + static_cast<int64_t>(from - body), to - from, 1, 0, 0);
    } else {
      // As many whole runs as the innermost dimension and the range have left.
      const Dim& inner = dims_[depth - 1];
      const uint64_t left = inner.count - index[depth - 1];
      const uint64_t fit = (end - body - run_) / inner.body_stride + 1;
      const uint64_t count = std::min(left, fit);
      copy(body, memory, run_, count, inner.body_stride, inner.memory_stride);
      index[depth - 1] += count - 1;
      body += (count - 1) * inner.body_stride;
      memory += static_cast<int64_t>(count - 1) * inner.memory_stride;
    }
    size_t dim = depth;
    for (; dim-- > 0;) {
      const Dim& d = dims_[dim];
      body += d.body_stride;
      memory += d.memory_stride;
      if (++index[dim] < d.count) break;
      index[dim] = 0;
      body -= d.count * d.body_stride;
      memory -= static_cast<int64_t>(d.count) * d.memory_stride;
    }
    if (dim == SIZE_MAX) return;  // all dimensions wrapped
  }
}

void Box::scatter(const std::byte* body, uint64_t begin, uint64_t end, std::byte* memory) const {
  visit(begin, end,
        [&](uint64_t at, int64_t to, uint64_t run, uint64_t count, uint64_t body_stride, int64_t memory_stride) {
          copy_runs(memory + to, memory_stride, body + (at - begin), static_cast<int64_t>(body_stride), count, run);
        });
}

void Box::gather(std::byte* body, uint64_t begin, uint64_t end, const std::byte* memory) const {
  visit(begin, end,
        [&](uint64_t at, int64_t from, uint64_t run, uint64_t count, uint64_t body_stride, int64_t memory_stride) {
          copy_runs(body + (at - begin), static_cast<int64_t>(body_stride), memory + from, memory_stride, count, run);
        });
}

uint64_t Box::run_bytes() const {
  uint64_t run = run_;
  for (size_t depth = dims_.size(); depth > 0 && dims_[depth - 1].body_stride == run; --depth) {
    run *= dims_[depth - 1].count;
  }
  return run;
}

void Box::runs(uint64_t begin, uint64_t end, const std::function<void(uint64_t, int64_t, uint64_t)>& emit) const {
  uint64_t from = 0, to = 0;
  int64_t memory = 0;
  visit(begin, end, [&](uint64_t at, int64_t at_memory, uint64_t run, uint64_t count, uint64_t stride, int64_t step) {
    for (uint64_t i = 0; i < count; ++i, at += stride, at_memory += step) {
      if (at != to || from == to) {
        if (from != to) emit(from, memory, to - from);
        from = at;
        memory = at_memory;
      }
      to = at + run;
    }
  });
  if (from != to) emit(from, memory, to - from);
}

void Box::runs_in_memory(uint64_t begin, uint64_t end,
                         const std::function<void(uint64_t, int64_t, uint64_t)>& emit) const {
  visit(begin, end, [&](uint64_t at, int64_t memory, uint64_t run, uint64_t count, uint64_t stride, int64_t step) {
    for (uint64_t i = 0; i < count; ++i, at += stride, memory += step) emit(at, memory, run);
  });
}

void Box::ranges(uint64_t gap, const std::function<void(uint64_t, uint64_t)>& emit) const {
  if (bytes_ == 0) return;
  // Dimensions whose repeats leave only small gaps are taken in one range.
  size_t depth = dims_.size();
  uint64_t run = run_;
  while (depth > 0 && dims_[depth - 1].body_stride - run <= gap) {
    run += (dims_[depth - 1].count - 1) * dims_[depth - 1].body_stride;
    --depth;
  }
  std::vector<uint64_t> index(depth);
  uint64_t body = begin_;
  for (;;) {
    emit(body, body + run);
    size_t dim = depth;
    for (; dim-- > 0;) {
      body += dims_[dim].body_stride;
      if (++index[dim] < dims_[dim].count) break;
      index[dim] = 0;
      body -= dims_[dim].count * dims_[dim].body_stride;
    }
    if (dim == SIZE_MAX) return;
  }
}

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
  const auto copy_step = [&](size_t number) {
    const Step& step = steps[number];
    for (size_t i = step.copy; i < step.end; ++i) copy(copies[i], step.from, step.to, way);
  };
  parallel_for(threads, steps.size(), 1, [&] { return copy_step; });
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
