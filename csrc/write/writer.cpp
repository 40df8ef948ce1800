#include "write/writer.h"

#include <algorithm>

namespace vescale_ckpt::write {
namespace {

constexpr uint64_t kRecordAlignment = 64;

// Where in a block a large body begins: where its memory begins in a page, so that a load into memory like it needs no
// copy. Other memory leaves the place that fits tensors of torch's allocator.
uint64_t place_in_block(const RecordSource& source) {
  const uint64_t place = reinterpret_cast<uintptr_t>(source.data) % kBlock;
  return source.strided || place % kRecordAlignment != 0 ? kTorchOffset : place;
}

}  // namespace

FileWriter::FileWriter(const std::string& path, uint64_t expected_bytes, const io::EngineOptions& options,
                       bool checksums)
    : options_(usable_for_writing(options)),
      checksums_(checksums),
      file_(io::File::create(path, options.widest)),
      control_(path, options.bytes_per_second) {
  try {
    file_->begin(expected_bytes, options.slot_bytes);
  } catch (...) {
    file_->discard();
    throw;
  }
}

FileWriter::~FileWriter() {
  if (!finished_) file_->discard();
}

uint64_t FileWriter::space_for(std::span<const int64_t> body_bytes) {
  constexpr uint64_t kFraming = 2 << 10;  // prologue, epilogue and row in the checksum table
  uint64_t total = 4 * kBlock;
  for (const int64_t bytes : body_bytes) {
    const auto body = static_cast<uint64_t>(bytes);
    total += body + body / 1024 + kFraming + (body >= io::kLargeBody ? 3 * kBlock : kRecordAlignment);
  }
  return total;
}

std::vector<PlacedRecord> FileWriter::write(std::span<const RecordSource> records) {
  std::vector<PlacedTensor> tensors = lay_out(records);
  const std::vector<uint32_t> blocks = send(tensors);
  std::vector<PlacedRecord> placed;
  placed.reserve(tensors.size());
  for (const PlacedTensor& tensor : tensors) {
    const TensorPlace& place = tensor.place;
    const uint32_t crc = format::joined_crc(place.begin, place.end, place.blocks);
    placed.push_back({tensor.begin(), tensor.end() - tensor.begin(), crc});
    // Blocks are for parts of tensors; objects are read whole, and one checksum does.
    if (checksums_ && tensor.framing != nullptr) {
      table_.add(tensor.begin(), place.begin, place.end - place.begin, crc, place.blocks);
    }
    cursor_ = align_up(tensor.end(), kBlock);
  }
  return placed;
}

// See docs/format.md, "Where records lie".
std::vector<PlacedTensor> FileWriter::lay_out(std::span<const RecordSource> sources) const {
  // Room that a group leaves for the prologue and first bytes of a large record behind it.
  constexpr uint64_t kSlack = 4 * kBlock;
  std::vector<PlacedTensor> tensors;
  tensors.reserve(sources.size());
  uint64_t cursor = cursor_, group = cursor_;  // where the latest record ends, and where its group begins
  bool after_large = false;
  for (const RecordSource& source : sources) {
    const uint64_t prologue = source.framing ? source.framing->prologue().size() : 0;
    const uint64_t epilogue = source.framing ? source.framing->epilogue_bytes() : 0;
    const uint64_t total = prologue + source.bytes + epilogue;
    const bool large = source.bytes >= io::kLargeBody;
    uint64_t begin = align_up(cursor, kRecordAlignment);
    bool apart = false;
    if (large) {
      begin = first_congruent(cursor + prologue, place_in_block(source)) - prologue;
    } else if (after_large || begin + total - group > options_.slot_bytes - kSlack) {
      begin = group = align_up(cursor, kBlock);
      apart = true;
    }
    const uint64_t body = begin + prologue;
    tensors.push_back({{file_.get(), body, body + source.bytes, body / format::kChecksumBlock, {}},
                       source.data,
                       source.strided ? &*source.strided : nullptr,
                       source.framing.get(),
                       apart,
                       source.unchanging});
    cursor = begin + total;
    after_large = large;
  }
  return tensors;
}

std::vector<uint32_t> FileWriter::send(std::span<PlacedTensor> tensors) {
  uint64_t count = 0;
  for (const PlacedTensor& tensor : tensors) count += format::cells(tensor.place.begin, tensor.place.end);
  std::vector<uint32_t> blocks(count);
  std::span<uint32_t> rest(blocks);
  for (PlacedTensor& tensor : tensors) {
    const auto of_tensor = rest.first(format::cells(tensor.place.begin, tensor.place.end));
    if (checksums_) tensor.place.blocks = of_tensor;
    rest = rest.subspan(of_tensor.size());
  }
  write_ranges(tensors, Edges::ours, options_, control_, stats_);
  return blocks;
}

uint64_t FileWriter::finish(bool sync) {
  control_.check();
  if (checksums_) {
    // Direct like all the rest, so that no page of the file is left in the cache: whole blocks, then the true length.
    const std::string table = table_.serialize(cursor_);
    const PlacedTensor tensor{{file_.get(), cursor_, cursor_ + table.size(), 0, {}},
                              reinterpret_cast<const std::byte*>(table.data())};
    io::EngineOptions alone = options_;
    alone.threads = 1;
    io::TransferControl unlimited(file_->path(), 0);
    io::TransferStats uncounted;
    write_ranges({&tensor, 1}, Edges::ours, alone, unlimited, uncounted);
    cursor_ += table.size();
  }
  return seal(cursor_, sync);
}

std::vector<uint32_t> FileWriter::write_dense(std::span<const RecordSource> sources, uint64_t offset) {
  std::vector<PlacedTensor> tensors;
  tensors.reserve(sources.size());
  for (const RecordSource& source : sources) {
    tensors.push_back({{file_.get(), offset, offset + source.bytes, offset / format::kChecksumBlock, {}}, source.data});
    offset += source.bytes;
  }
  std::vector<uint32_t> blocks = send(tensors);
  cursor_ = offset;
  return blocks;
}

uint64_t FileWriter::finish_dense(std::span<const std::byte> head, bool sync) {
  control_.check();
  io::write_exactly(*file_, 0, head);
  return seal(cursor_, sync);
}

uint64_t FileWriter::seal(uint64_t length, bool sync) {
  file_->complete(length, sync);
  file_->close();
  control_.check();  // syncing may have taken long
  finished_ = true;
  return length;
}

}  // namespace vescale_ckpt::write
