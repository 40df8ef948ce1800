#include "fingerprint/device_sums.h"

#include <algorithm>
#include <iterator>
#include <memory>

#include "device/cuda.h"

namespace vescale_ckpt::fingerprint {
namespace {

using device::WordPowers;
using device::WordTable;

static_assert(device::kSumWordBytes == kWordBytes);

constexpr uint64_t kLeastRun = 256;

// Returns how many pieces a chunk has.
uint64_t pieces_of(const io::Box& box) {
  const uint64_t pieces = device::pieces_of_run(box.memory_run_bytes());
  return box.dense() ? pieces : pieces * box.dims()[0].count;
}

// A chunk over the memory of `word_powers`, or its copy on a device: runs at each place in a word and in a unit of
// memory, far behind the tensor's begin. Every launch computes its fingerprint, too, so that a device or a compiler
// that errs is found out.
Chunk known_chunk(const std::byte* powers) {
  constexpr int64_t kFar = int64_t{1} << 40;
  const std::vector<int64_t> shape{kFar + 20, 2501}, offset{kFar, 5}, size{20, 1700}, strides{1733, 1};
  static_assert(20 * 1733 <= sizeof(WordPowers));
  return {io::Box(1, shape, offset, size, strides), powers};
}

Value value_of(const device::WordSum& sum) {
  Value total = 0;
  for (unsigned i = 0; i < 4; ++i) total = field::sum(total, field::shifted(Value{sum.columns[i]}, 32 * i));
  return total;
}

}  // namespace

const WordPowers& word_powers() {
  static const std::unique_ptr<const WordPowers> powers = [] {
    auto made = std::make_unique<WordPowers>();
    for (uint64_t i = 0; i < device::kSumSteps; ++i) made->steps[i] = field::power(kPoint, i * device::kSumLanes);
    for (unsigned digit = 0; digit < 8; ++digit) {
      for (uint64_t i = 0; i < 256; ++i) made->digits[digit][i] = field::power(kPoint, i << (8 * digit));
    }
    return made;
  }();
  return *powers;
}

namespace detail {

bool add_to_table(const Chunk& chunk, WordTable& table) {
  const uint64_t pieces = pieces_of(chunk.box), run = chunk.box.memory_run_bytes();
  if (table.rows.size() == device::kWordRows || pieces > device::kWordPieces - table.pieces) return false;
  const io::Box::Dim repeat = chunk.box.dense() ? io::Box::Dim{1, 0, 0} : chunk.box.dims()[0];
  table.rows.push_back({reinterpret_cast<uintptr_t>(chunk.memory), chunk.box.begin(), run, repeat.memory_stride,
                        repeat.body_stride, table.pieces, static_cast<uint32_t>(device::pieces_of_run(run))});
  table.pieces += static_cast<uint32_t>(pieces);
  return true;
}

}  // namespace detail

bool is_for_kernel(const io::Box& box) {
  constexpr uint64_t kRoom = 1024;  // for the known chunk
  return box.dims().size() <= 1 && (box.dense() || box.memory_run_bytes() >= kLeastRun) &&
         pieces_of(box) <= device::kWordPieces - kRoom;
}

std::optional<std::vector<Value>> of_device_chunks(device::Accelerator& accelerator, device::StreamHandle producer,
                                                   std::span<const Chunk> chunks) {
  const auto slab = accelerator.make_slab(device::kWordRows * sizeof(device::WordSum));
  if (slab == nullptr) return std::nullopt;
  const auto event = accelerator.make_event();
  const auto stream = accelerator.make_stream(device::Priority::normal);
  event->record(producer);
  stream->after(*event);
  const Value known = of_chunks(std::vector{known_chunk(reinterpret_cast<const std::byte*>(&word_powers()))}, 1)[0];
  std::vector<Value> values;
  values.reserve(chunks.size());
  while (values.size() < chunks.size()) {
    WordTable table;
    detail::add_to_table(known_chunk(reinterpret_cast<const std::byte*>(slab->table())), table);
    for (size_t i = values.size(); i < chunks.size() && detail::add_to_table(chunks[i], table);) ++i;
    const std::vector<device::WordSum> sums = stream->sum_words(*slab, table, word_powers());
    if (value_of(sums[0]) != known) {
      device::note("the kernel of fingerprints computes known values wrong on the device at " +
                   accelerator.pci_address() + ": fingerprints are taken on the host");
      return std::nullopt;
    }
    std::transform(sums.begin() + 1, sums.end(), std::back_inserter(values), value_of);
  }
  return values;
}

}  // namespace vescale_ckpt::fingerprint
