#include "fingerprint/device_sums.h"

#include <algorithm>
#include <memory>

#include "device/cuda.h"

namespace vescale_ckpt::fingerprint {
namespace {

using device::kLeadWords;
using device::WordPowers;
using device::WordTable;
using field::kPrime;
using field::power;
using field::product;

constexpr uint64_t kLeastRun = 256;
constexpr Value kWithoutLead = power(kPoint, kPrime - 1 - kLeadWords);  // x^(p - 1) is 1

// Returns how many pieces a chunk has.
uint64_t pieces_of(const io::Box& box) {
  uint64_t pieces = device::pieces_of_run(box.memory_run_bytes());
  for (const io::Box::Dim& dim : box.dims()) {
    if (__builtin_mul_overflow(pieces, dim.count, &pieces)) return UINT64_MAX;
  }
  return pieces;
}

// Chunks over the memory of `word_powers`, or its copy on a device: at each place in a word, and of many runs. Every
// launch computes their fingerprints, too, so that a device or a compiler that errs is found out.
std::vector<Chunk> known_chunks(const std::byte* powers) {
  std::vector<Chunk> chunks;
  constexpr auto kBytes = static_cast<int64_t>(sizeof(WordPowers));
  for (int64_t place = 0; place < static_cast<int64_t>(kWordBytes); ++place) {
    const std::vector<int64_t> shape{kBytes}, offset{place}, size{kBytes - 5 * place}, stride{1};
    chunks.push_back({io::Box(1, shape, offset, size, stride), powers + 5 * place});
  }
  const std::vector<int64_t> shape{90, 1001}, offset{0, 5}, size{90, 300}, strides{317, 1};
  chunks.push_back({io::Box(1, shape, offset, size, strides), powers});
  return chunks;
}

const std::vector<Value>& known_values() {
  static const std::vector<Value> values =
      of_chunks(known_chunks(reinterpret_cast<const std::byte*>(&detail::word_powers())), 1);
  return values;
}

}  // namespace

namespace detail {

const WordPowers& word_powers() {
  static const std::unique_ptr<const WordPowers> powers = [] {
    auto made = std::make_unique<WordPowers>();
    Value base = kPoint;
    for (auto& digits : made->digits) {
      Value of_digit = 1;
      for (Value& digit : digits) {
        digit = of_digit;
        of_digit = product(of_digit, base);
      }
      base = of_digit;
    }
    for (uint32_t step = 0; step < device::kLaneSteps; ++step) {
      for (uint32_t word = 0; word <= device::kLaneWords; ++word) {
        const Value of_word = power(kPoint, uint64_t{step} * (device::kSumStepBytes / kWordBytes) + word);
        for (uint32_t limb = 0; limb < 4; ++limb) {
          made->steps[step][word].limbs[limb] = static_cast<uint32_t>(of_word >> (32 * limb));
        }
      }
    }
    return made;
  }();
  return *powers;
}

bool add_to_table(const Chunk& chunk, WordTable& table) {
  const std::span<const io::Box::Dim> dims = chunk.box.dims();
  const uint64_t pieces = pieces_of(chunk.box), run = chunk.box.memory_run_bytes();
  if (table.rows.size() == device::kWordRows || table.dims.size() + dims.size() > device::kWordDims ||
      pieces > device::kWordPieces - table.pieces) {
    return false;
  }
  table.rows.push_back({reinterpret_cast<uintptr_t>(chunk.memory), chunk.box.begin(), run, table.pieces,
                        static_cast<uint32_t>(device::pieces_of_run(run)), static_cast<uint32_t>(dims.size()),
                        static_cast<uint32_t>(table.dims.size())});
  for (const io::Box::Dim& dim : dims) table.dims.push_back({dim.count, dim.memory_stride, dim.body_stride});
  table.pieces += static_cast<uint32_t>(pieces);
  return true;
}

Value value_of(const device::WordSum& sum) {
  Value total = 0;
  for (unsigned i = 0; i < 4; ++i) total = field::sum(total, field::shifted(Value{sum.columns[i]}, 32 * i));
  return product(total, kWithoutLead);
}

}  // namespace detail

bool is_for_kernel(const io::Box& box) {
  constexpr uint64_t kRoom = 1024;  // for known chunks
  return (box.dims().empty() || box.memory_run_bytes() >= kLeastRun) && pieces_of(box) <= device::kWordPieces - kRoom;
}

std::optional<std::vector<Value>> of_device_chunks(device::Accelerator& accelerator, device::StreamHandle producer,
                                                   std::span<const Chunk> chunks) {
  const auto slab = accelerator.make_slab(device::kWordRows * sizeof(device::WordSum));
  if (slab == nullptr) return std::nullopt;
  const auto event = accelerator.make_event();
  const auto stream = accelerator.make_stream(device::Priority::normal);
  event->record(producer);
  stream->after(*event);
  std::vector<Value> values;
  values.reserve(chunks.size());
  while (values.size() < chunks.size()) {
    WordTable table;
    for (const Chunk& chunk : known_chunks(reinterpret_cast<const std::byte*>(slab->table()))) {
      detail::add_to_table(chunk, table);
    }
    for (size_t i = values.size(); i < chunks.size() && detail::add_to_table(chunks[i], table);) ++i;
    const std::vector<device::WordSum> sums = stream->sum_words(*slab, table, detail::word_powers());
    std::vector<Value> found(sums.size());
    std::ranges::transform(sums, found.begin(), detail::value_of);
    const auto behind = found.begin() + static_cast<ptrdiff_t>(known_values().size());
    if (!std::equal(found.begin(), behind, known_values().begin())) {
      device::note("the kernel of fingerprints computes known values wrong on the device at " +
                   accelerator.pci_address() + ": fingerprints are taken on the host");
      return std::nullopt;
    }
    values.insert(values.end(), behind, found.end());
  }
  return values;
}

}  // namespace vescale_ckpt::fingerprint
