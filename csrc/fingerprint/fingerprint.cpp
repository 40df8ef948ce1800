#include "fingerprint/fingerprint.h"

#include <algorithm>
#include <array>
#include <optional>

#include "base/workers.h"
#include "device/word_sums.h"
#include "fingerprint/device_sums.h"
#include "fingerprint/words.h"
#include "format/torch_record.h"

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

constexpr uint64_t kPartBytes = 4 << 20, kGatherBytes = 32 << 10;

// A part of a chunk, for one thread: a range of bytes of the tensor.
struct Part {
  size_t chunk;
  uint64_t begin, end;
};

Value of_part(const Chunk& chunk, uint64_t begin, uint64_t end, std::vector<std::byte>& buffer) {
  Value total = 0;
  const io::Box& box = chunk.box;
  const bool gathers = box.memory_run_bytes() != box.run_bytes();
  if (gathers) buffer.resize(kGatherBytes);
  box.runs(begin, end, [&](uint64_t at, int64_t memory, uint64_t bytes) {
    if (!gathers) total = sum(total, of_run(chunk.memory + memory, bytes, at));
    for (uint64_t done = 0; gathers && done < bytes; done += kGatherBytes) {
      const uint64_t some = std::min(kGatherBytes, bytes - done);
      box.gather(buffer.data(), at + done, at + done + some, chunk.memory);
      total = sum(total, of_run(buffer.data(), some, at + done));
    }
  });
  return total;
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
  struct Held {
    std::vector<uint32_t> items;
    std::vector<Chunk> chunks;
  };
  std::map<int, Held> by_device;  // -1: the host
  ItemValues result{std::vector<Value>(state.inventory.size()), {}};
  for (uint32_t number = 0; number < state.inventory.size(); ++number) {
    const state::Item item = state.inventory[number];
    if (item.kind == state::ItemKind::object || item.bytes == 0) continue;
    if (static_cast<uint8_t>(state.ready[static_cast<size_t>(state.sources[number][0])]) == state::kNotReady) {
      result.rest.push_back(number);
      continue;
    }
    // A row of dtype, address, number of dimensions, sizes and strides.
    const state::CopyTable table = state::make_copy_table(state, std::array<int64_t, 4>{number, -1, 0, 0});
    const std::span<const int64_t> row(table.rows);
    const uint32_t item_bytes = format::dtypes()[static_cast<size_t>(row[0])].item_bytes;
    const Chunk chunk{io::Box(item_bytes, item.shape, item.offset, item.size, row.last(item.size.size())),
                      reinterpret_cast<const std::byte*>(row[1])};
    const auto device = static_cast<int>(table.devices[0]);
    if (device >= 0 && !(runtime != nullptr && streams.contains(device) && is_for_kernel(chunk.box))) {
      result.rest.push_back(number);
      continue;
    }
    by_device[device].items.push_back(number);
    by_device[device].chunks.push_back(chunk);
  }
  for (const auto& [device, held] : by_device) {
    const std::optional<std::vector<Value>> found =
        device < 0 ? of_chunks(held.chunks, threads)
                   : of_device_chunks(runtime->accelerator(device), streams.at(device), held.chunks);
    if (!found) result.rest.insert(result.rest.end(), held.items.begin(), held.items.end());
    for (size_t i = 0; found && i < held.items.size(); ++i) result.values[held.items[i]] = (*found)[i];
  }
  std::ranges::sort(result.rest);
  return result;
}

}  // namespace vescale_ckpt::fingerprint
