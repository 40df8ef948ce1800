#include "write/writer.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

namespace vescale_ckpt::write {
namespace {

constexpr uint64_t kRecordAlignment = 64;

// The block offset of a large body: the page offset of its memory, so that a load into similar memory needs no copy.
// Strided or oddly aligned memory gets the offset of torch's allocator.
uint64_t place_in_block(const RecordSource& source) {
  const uint64_t place = reinterpret_cast<uintptr_t>(source.data) % kBlock;
  return source.strided || place % kRecordAlignment != 0 ? kTorchOffset : place;
}

}  // namespace

FileWriter::FileWriter(const std::string& path, uint64_t expected_bytes, const io::EngineOptions& options,
                       bool checksums, uint32_t most_files)
    : options_(usable_for_writing(options)),
      checksums_(checksums),
      expected_bytes_(expected_bytes),
      control_(path, options.bytes_per_second) {
  std::unique_ptr<io::File> file = io::File::create(path, options.widest);
  if (file->access() != io::Access::direct && !io::is_remote(path)) wanted_files_ = most_files;
  expected_bytes_ /= wanted_files_;
  begin(std::move(file));
}

FileWriter::~FileWriter() {
  if (finished_) return;
  for (const DataFile& data : files_) data.file->discard();
}

void FileWriter::add_file(const std::string& path) {
  begin(io::File::create(path, options_.widest));
}

void FileWriter::begin(std::unique_ptr<io::File> file) {
  try {
    file->begin(expected_bytes_, options_.slot_bytes, wanted_files_ == 1);
  } catch (...) {
    file->discard();
    throw;
  }
  files_.emplace_back().file = std::move(file);
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
  const Spread where = spread(records);
  std::vector<PlacedTensor> tensors = lay_out(records, where);
  const std::vector<uint32_t> blocks = send(tensors, Edges::exclusive);
  std::vector<PlacedRecord> placed(records.size());
  for (size_t at = 0; at < tensors.size(); ++at) {
    const PlacedTensor& tensor = tensors[at];
    const TensorPlace& place = tensor.place;
    const size_t record = where.order[at];
    const uint32_t file = where.file_of[record], crc = format::joined_crc(place.begin, place.end, place.blocks);
    placed[record] = {tensor.begin(), tensor.end() - tensor.begin(), crc, file};
    // Block checksums serve reads of parts of tensors. An object is read whole, so one checksum suffices.
    if (checksums_ && tensor.framing != nullptr) {
      files_[file].table.add(tensor.begin(), place.begin, place.end - place.begin, crc, place.blocks);
    }
    files_[file].cursor = align_up(tensor.end(), kBlock);
    files_[file].used = true;
  }
  return placed;
}

FileWriter::Spread FileWriter::spread(std::span<const RecordSource> records) const {
  Spread spread{std::vector<uint32_t>(records.size()), std::vector<size_t>(records.size())};
  auto& [file_of, order] = spread;
  std::iota(order.begin(), order.end(), size_t{0});
  if (files_.size() == 1) return spread;
  // Consecutive small records form groups of at most one slot. Groups go to the least filled file, largest group first.
  struct Group {
    size_t first, end;
    uint64_t bytes;
  };
  std::vector<Group> groups;
  for (size_t at = 0; at < records.size(); ++at) {
    const uint64_t bytes = records[at].bytes;
    const bool fits = !groups.empty() && bytes < io::kLargeBody && groups.back().bytes + bytes <= options_.slot_bytes;
    if (!fits) groups.push_back({at, at, 0});
    groups.back().end = at + 1;
    groups.back().bytes += bytes;
  }
  std::ranges::stable_sort(groups, std::greater(), &Group::bytes);
  std::vector<uint64_t> filled;
  for (const DataFile& data : files_) filled.push_back(data.cursor);
  for (const Group& group : groups) {
    const auto least = std::ranges::min_element(filled);
    *least += group.bytes;
    std::fill(file_of.begin() + static_cast<ptrdiff_t>(group.first),
              file_of.begin() + static_cast<ptrdiff_t>(group.end), static_cast<uint32_t>(least - filled.begin()));
  }
  std::ranges::stable_sort(order, {}, [&files = file_of](size_t record) { return files[record]; });
  return spread;
}

// See docs/format.md, "Where records lie".
std::vector<PlacedTensor> FileWriter::lay_out(std::span<const RecordSource> sources, const Spread& spread) const {
  // Room in a group's slot for the prologue and first bytes of a large record that follows.
  constexpr uint64_t kSlack = 4 * kBlock;
  std::vector<PlacedTensor> tensors;
  tensors.reserve(sources.size());
  const DataFile* data = nullptr;
  uint64_t cursor = 0, group = 0;  // end of the latest record, and begin of its group
  bool after_large = false;
  for (const size_t record : spread.order) {
    const RecordSource& source = sources[record];
    if (const DataFile& file = files_[spread.file_of[record]]; data != &file) {
      data = &file;
      cursor = group = data->cursor;
      after_large = false;
    }
    const uint64_t prologue = source.framing ? source.framing->prologue().size() : 0;
    const uint64_t epilogue = source.framing ? source.framing->epilogue_bytes() : 0;
    const uint64_t total = prologue + source.bytes + epilogue;
    const bool large = source.bytes >= io::kLargeBody;
    uint64_t begin = align_up(cursor, kRecordAlignment);
    bool apart = false;
    if (large) {
      begin = next_congruent(cursor + prologue, place_in_block(source)) - prologue;
    } else if (after_large || begin + total - group > options_.slot_bytes - kSlack) {
      begin = group = align_up(cursor, kBlock);
      apart = true;
    }
    const uint64_t body = begin + prologue;
    tensors.push_back({{data->file.get(), body, body + source.bytes, body / format::kChecksumBlock, {}},
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

std::vector<uint32_t> FileWriter::send(std::span<PlacedTensor> tensors, Edges edges) {
  uint64_t count = 0;
  for (const PlacedTensor& tensor : tensors) count += format::cells(tensor.place.begin, tensor.place.end);
  std::vector<uint32_t> blocks(count);
  std::span<uint32_t> rest(blocks);
  for (PlacedTensor& tensor : tensors) {
    const auto of_tensor = rest.first(format::cells(tensor.place.begin, tensor.place.end));
    if (checksums_) tensor.place.blocks = of_tensor;
    rest = rest.subspan(of_tensor.size());
  }
  write_ranges(tensors, edges, options_, control_, stats_);
  return blocks;
}

uint64_t FileWriter::finish(bool sync) {
  control_.check();
  uint64_t length = 0;
  for (DataFile& data : files_) {
    if (&data != &files_[0] && !data.used) {
      data.file->discard();
      continue;
    }
    if (checksums_) {
      // By the same direct writes as the rest, so that no page of the file stays in the cache; seal() sets the length.
      const std::string table = data.table.serialize(data.cursor);
      const PlacedTensor tensor{{data.file.get(), data.cursor, data.cursor + table.size(), 0, {}},
                                reinterpret_cast<const std::byte*>(table.data())};
      io::EngineOptions alone = options_;
      alone.threads = 1;
      io::TransferControl unlimited(data.file->path(), 0);
      io::TransferStats uncounted;
      write_ranges({&tensor, 1}, Edges::exclusive, alone, unlimited, uncounted);
      data.cursor += table.size();
    }
    length += seal(data, sync);
  }
  finished_ = true;
  return length;
}

std::vector<uint32_t> FileWriter::write_dense(std::span<const RecordSource> sources, uint64_t offset) {
  std::vector<PlacedTensor> tensors;
  tensors.reserve(sources.size());
  for (const RecordSource& source : sources) {
    tensors.push_back(
        {{files_[0].file.get(), offset, offset + source.bytes, offset / format::kChecksumBlock, {}}, source.data});
    offset += source.bytes;
  }
  // The block at the border of two calls belongs to both. Remote files are sent in order, which rules out edges that
  // are written first.
  std::vector<uint32_t> blocks = send(tensors, files_[0].file->window() == nullptr ? Edges::shared : Edges::exclusive);
  files_[0].cursor = offset;
  return blocks;
}

uint64_t FileWriter::finish_dense(std::span<const std::byte> head, bool sync) {
  control_.check();
  io::write_exactly(*files_[0].file, 0, head);
  const uint64_t length = seal(files_[0], sync);
  finished_ = true;
  return length;
}

uint64_t FileWriter::seal(DataFile& data, bool sync) {
  data.file->complete(data.cursor, sync);
  data.file->close();
  control_.check();  // the sync may have taken long
  return data.cursor;
}

}  // namespace vescale_ckpt::write
