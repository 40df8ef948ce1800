#include "hf/safetensors_load.h"

#include <algorithm>
#include <bit>
#include <new>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/memory.h"
#include "format/torch_record.h"

namespace vescale_ckpt::hf {
namespace {

// Tensors of so many bytes lie on blocks as they do in the file, also where that leaves a gap.
constexpr uint64_t kLarge = 1 << 20;

// Tensors that share a block of memory.
struct Group {
  struct Member {
    size_t position;  // in the load
    uint64_t offset;  // in the memory
  };
  std::vector<Member> members;
  uint64_t end = 0;

  // Where a tensor goes: behind the others. In host memory first or large ones go on the byte of a disk's block that
  // they have in the file.
  uint64_t offset_for(const SafetensorsHeader::Tensor& tensor, bool on_device) const {
    if (on_device) return align_up(end, SafetensorsLoad::kDeviceAlignment);
    const uint64_t behind = align_up(end, SafetensorsLoad::kAlignment);
    if (!members.empty() && tensor.end - tensor.begin < kLarge) return behind;
    return next_congruent(behind, align_up(tensor.begin, SafetensorsLoad::kAlignment));
  }

  // From the heap, as torch's: what was given back to it before is still there.
  std::shared_ptr<std::byte> memory() const {
    const std::align_val_t alignment{std::clamp<uint64_t>(std::bit_floor(end), kBlock, kHugePage)};
    auto* const data = static_cast<std::byte*>(::operator new(end, alignment));
    return {data, [alignment](std::byte* memory) { ::operator delete(memory, alignment); }};
  }
};

}  // namespace

SafetensorsLoad::SafetensorsLoad(std::shared_ptr<const SafetensorsFile> file, std::span<const size_t> numbers,
                                 bool verify, const io::EngineOptions& options, const OnDevice* target)
    : file_(std::move(file)), tensors_(numbers.size()) {
  for (size_t position = 0; position < numbers.size(); ++position) {
    const SafetensorsHeader::Tensor& tensor = file_->header.tensors()[numbers[position]];
    try {
      tensors_[position].shape = file_->header.torch_shape(tensor);
    } catch (const Error& error) {
      throw error.of_item(static_cast<int64_t>(position));
    }
    tensors_[position].dtype = file_->header.dtype(tensor).torch;
    tensors_[position].bytes = tensor.end - tensor.begin;
  }
  take_memory(numbers, target);
  std::vector<int64_t> rows;
  std::vector<read::ReadItem> wanted = items(numbers, rows, target == nullptr ? -1 : target->device);
  read::DeviceSink* const sink = target == nullptr || wanted.empty() ? nullptr : target->sink();
  report_ =
      std::async(std::launch::async, [this, wanted = std::move(wanted), rows = std::move(rows), verify, options, sink] {
        const std::vector<std::string> paths = {file_->file->path()};
        const read::OpenFile open = [&](uint32_t) { return file_->file; };
        try {
          return read::read_tensors(paths, wanted, verify, options, sink, open, new_memory_ ? &*new_memory_ : nullptr);
        } catch (const Error& error) {
          if (error.item == Error::kNoItem) throw;
          throw error.of_item(rows[static_cast<size_t>(error.item)]);
        }
      });
}

void SafetensorsLoad::take_memory(std::span<const size_t> numbers, const OnDevice* target) {
  const bool on_device = target != nullptr;
  Group group;
  size_t blocks = 0;
  std::vector<std::span<std::byte>> taken;
  const auto take = [&] {
    if (group.members.empty()) return;
    const bool alone = group.members.size() == 1;
    std::shared_ptr<std::byte> memory;
    if (!on_device) {
      memory = group.memory();
      taken.emplace_back(memory.get(), group.end);
    } else {
      const uint64_t bytes = align_up(group.end, kDeviceAlignment);
      memory = {std::shared_ptr<std::byte>(),
                target->take(alone ? &tensors_[group.members[0].position] : nullptr, bytes)};
    }
    for (const auto [position, offset] : group.members) {
      Tensor& tensor = tensors_[position];
      tensor.data = {memory, memory.get() + offset};
      tensor.block = blocks;
      tensor.offset = offset;
      tensor.alone = alone;
    }
    ++blocks;
    group = {};
  };
  for (size_t position = 0; position < numbers.size(); ++position) {
    const SafetensorsHeader::Tensor& tensor = file_->header.tensors()[numbers[position]];
    const uint64_t bytes = tensors_[position].bytes;
    if (bytes == 0) continue;
    if (bytes >= kOwnMemory || group.offset_for(tensor, on_device) + bytes > kSharedMemory) take();
    const uint64_t offset = group.offset_for(tensor, on_device);
    group.members.push_back({position, offset});
    group.end = offset + bytes;
    if (bytes >= kOwnMemory) take();
  }
  take();
  if (!on_device) new_memory_.emplace(std::move(taken));
}

// One for each tensor with bytes, and their positions.
std::vector<read::ReadItem> SafetensorsLoad::items(std::span<const size_t> numbers, std::vector<int64_t>& rows,
                                                   int device) const {
  std::vector<uint32_t> dtypes;
  for (const SafetensorsDType& dtype : safetensors_dtypes()) {
    dtypes.push_back(format::dtype_named(dtype.torch).value_or(0));
  }
  std::vector<read::ReadItem> items;
  items.reserve(numbers.size());
  std::vector<int64_t> zeros;
  for (size_t position = 0; position < numbers.size(); ++position) {
    const Tensor& target = tensors_[position];
    if (target.data == nullptr) continue;
    const SafetensorsHeader::Tensor& tensor = file_->header.tensors()[numbers[position]];
    const uint32_t dtype = dtypes[tensor.dtype];
    zeros.assign(target.shape.size(), 0);
    const io::Box whole(format::dtypes()[dtype].item_bytes, target.shape, zeros, target.shape,
                        format::contiguous_strides(target.shape));
    items.push_back({.file = 0,
                     .record_offset = tensor.begin,
                     .record_length = target.bytes,
                     .dtype = dtype,
                     .chunk_sizes = target.shape,
                     .box = whole,
                     .memory = target.data.get(),
                     .bare = true,
                     .blocks = file_->header.blocks(tensor),
                     .device = device});
    rows.push_back(static_cast<int64_t>(position));
  }
  return items;
}

}  // namespace vescale_ckpt::hf
