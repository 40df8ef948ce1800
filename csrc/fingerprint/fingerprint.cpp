#include "fingerprint/fingerprint.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/workers.h"
#include "device/word_sums.h"
#include "fingerprint/device_sums.h"
#include "fingerprint/words.h"
#include "format/torch_record.h"
#include "io/table_cursor.h"

namespace vescale_ckpt::fingerprint {
namespace {

using field::product;
using field::sum;

constexpr uint64_t kBlockBytes = kBlockWords * kWordBytes;
constexpr Value kBlockPower = product(kPowers[kBlockWords - 1], kPoint);

// Returns the sum of a run of bytes at an offset in its tensor.
Value of_run(const std::byte* data, uint64_t bytes, uint64_t offset) {
  Value total = 0, factor = 1;
  if (const uint64_t before = offset % kWordBytes; before != 0) {
    const uint64_t taken = std::min(bytes, kWordBytes - before);
    total = of_block(data, taken) << (8 * before);
    factor = kPoint;
    data += taken;
    bytes -= taken;
  }
  for (; bytes != 0; factor = product(factor, kBlockPower)) {
    const uint64_t some = std::min(bytes, kBlockBytes);
    total = sum(total, product(factor, of_block(data, some)));
    data += some;
    bytes -= some;
  }
  return device::times_power(total, offset / kWordBytes, word_powers());
}

constexpr uint64_t kPartBytes = 4 << 20, kShortRun = 64, kGatherBytes = 32 << 10;

// A part of a chunk, for one thread: a range of bytes of the tensor.
struct Part {
  size_t chunk;
  uint64_t begin, end;
};

Value of_part(const Chunk& chunk, uint64_t begin, uint64_t end, std::vector<std::byte>& buffer) {
  Value total = 0;
  const auto add = [&](const std::byte* data, uint64_t bytes, uint64_t at) {
    total = sum(total, of_run(data, bytes, at));
  };
  const io::Box& box = chunk.box;
  if (box.memory_run_bytes() >= std::min(kShortRun, box.run_bytes())) {
    box.runs_in_memory(begin, end,
                       [&](uint64_t at, int64_t memory, uint64_t bytes) { add(chunk.memory + memory, bytes, at); });
    return total;
  }
  buffer.resize(kGatherBytes);
  box.runs(begin, end, [&](uint64_t at, int64_t, uint64_t bytes) {
    for (uint64_t done = 0; done < bytes; done += kGatherBytes) {
      const uint64_t some = std::min(kGatherBytes, bytes - done);
      box.gather(buffer.data(), at + done, at + done + some, chunk.memory);
      add(buffer.data(), some, at + done);
    }
  });
  return total;
}

struct ChunksOfItems {
  std::vector<uint32_t> items;
  std::vector<Chunk> chunks;
};

// Returns the chunks that the host (device -1) or the kernel of a device in `streams` reads, by their devices. `rest`
// gets the items of others.
std::map<int64_t, ChunksOfItems> chunks_by_device(const state::StateTables& state,
                                                  const std::map<int, device::StreamHandle>& streams,
                                                  std::vector<uint32_t>& rest) {
  std::vector<uint32_t> items;
  std::vector<int64_t> whole;  // rows of a local plan
  for (uint32_t number = 0; number < state.inventory.size(); ++number) {
    const state::Item item = state.inventory[number];
    if (item.kind == state::ItemKind::object || item.bytes == 0) continue;
    if (static_cast<uint8_t>(state.ready[static_cast<size_t>(state.sources[number][0])]) == state::kNotReady) {
      rest.push_back(number);
      continue;
    }
    items.push_back(number);
    whole.insert(whole.end(), {int64_t{number}, -1, 0, 0});
  }
  const state::CopyTable table = state::make_copy_table(state, whole);
  io::TableCursor cursor(table.rows);
  std::map<int64_t, ChunksOfItems> found;
  for (size_t i = 0; i < items.size(); ++i) {
    const state::Item item = state.inventory[items[i]];
    const uint32_t item_bytes = format::dtypes()[cursor.dtype()].item_bytes;
    const std::byte* const memory = cursor.address();
    const uint64_t dims = cursor.size();
    cursor.take(dims);  // the sizes, which are the item's
    const io::Box box(item_bytes, item.shape, item.offset, item.size, cursor.take(dims));
    cursor.next_row();
    const int64_t device = table.devices[i];
    if (device >= 0 && !(streams.contains(static_cast<int>(device)) && is_for_kernel(box))) {
      rest.push_back(items[i]);
      continue;
    }
    found[device].items.push_back(items[i]);
    found[device].chunks.push_back({box, memory});
  }
  return found;
}

}  // namespace

std::vector<Value> of_chunks(std::span<const Chunk> chunks, unsigned threads) {
  std::vector<Part> parts;
  for (size_t i = 0; i < chunks.size(); ++i) {
    const io::Box& box = chunks[i].box;
    if (box.bytes() == 0) continue;
    // A chunk may be thin in its tensor: parts are ranges of the tensor that hold about the same share of it.
    const uint64_t count = (box.bytes() + kPartBytes - 1) / kPartBytes,
                   step = (box.end() - box.begin() + count - 1) / count;
    for (uint64_t begin = box.begin(); begin < box.end(); begin += step) {
      parts.push_back({i, begin, std::min(box.end(), begin + step)});
    }
  }
  std::vector<Value> of_parts(parts.size());
  parallel_for(threads, parts.size(), 1, [&] {
    return [&, buffer = std::vector<std::byte>()](size_t index) mutable {
      const Part& part = parts[index];
      of_parts[index] = of_part(chunks[part.chunk], part.begin, part.end, buffer);
    };
  });
  std::vector<Value> values(chunks.size());
  for (size_t i = 0; i < parts.size(); ++i) values[parts[i].chunk] = sum(values[parts[i].chunk], of_parts[i]);
  return values;
}

ItemValues of_items(const state::StateTables& state, unsigned threads, device::DeviceRuntime* runtime,
                    const std::map<int, device::StreamHandle>& streams) {
  ItemValues result{std::vector<Value>(state.inventory.size()), {}};
  const std::map<int, device::StreamHandle> none;
  for (const auto& [device, held] : chunks_by_device(state, runtime == nullptr ? none : streams, result.rest)) {
    std::optional<std::vector<Value>> found;
    if (device < 0) {
      found = of_chunks(held.chunks, threads);
    } else {
      const auto number = static_cast<int>(device);
      found = of_device_chunks(runtime->accelerator(number), streams.at(number), held.chunks);
    }
    if (!found) result.rest.insert(result.rest.end(), held.items.begin(), held.items.end());
    for (size_t i = 0; found && i < held.items.size(); ++i) result.values[held.items[i]] = (*found)[i];
  }
  std::ranges::sort(result.rest);
  return result;
}

}  // namespace vescale_ckpt::fingerprint
