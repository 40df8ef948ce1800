#include "hf/safetensors_layout.h"

#include <algorithm>
#include <numeric>
#include <tuple>
#include <utility>

#include "base/error.h"
#include "base/memory.h"
#include "format/checksum_table.h"
#include "format/json.h"

namespace vescale_ckpt::hf {
namespace {

// Elements of a byte are told one by one: the last dimension is as many times longer.
std::vector<uint64_t> stored_shape(const SafetensorsLayout::Tensor& tensor, int64_t index) {
  std::vector<uint64_t> shape = tensor.shape;
  const uint32_t bits = safetensors_dtypes()[tensor.dtype].bits;
  if (bits >= 8) return shape;
  if (shape.empty()) throw Error::invalid("it has no dimension that its two values could lie along", index);
  if (__builtin_mul_overflow(shape.back(), uint64_t{8 / bits}, &shape.back()))
    throw Error::invalid("its size overflows", index);
  return shape;
}

uint64_t bytes_of(std::span<const uint64_t> shape, uint32_t bits, int64_t index) {
  uint64_t total = bits;
  for (const uint64_t size : shape) {
    if (__builtin_mul_overflow(total, size, &total)) throw Error::invalid("its size overflows", index);
  }
  return total / 8;
}

void append_tensor(std::string& text, const SafetensorsLayout::Tensor& tensor, std::span<const uint64_t> shape,
                   uint64_t begin, uint64_t end) {
  format::append_json_string(text, tensor.name);
  text += ":{\"dtype\":\"";
  text += safetensors_dtypes()[tensor.dtype].name;
  text += "\",\"shape\":[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i == 0 ? "" : ",") + std::to_string(shape[i]);
  text += "],\"data_offsets\":[" + std::to_string(begin) + "," + std::to_string(end) + "]}";
}

}  // namespace

SafetensorsLayout::SafetensorsLayout(std::vector<Tensor> tensors, SafetensorsHeader::Metadata metadata)
    : order_(tensors.size()) {
  std::iota(order_.begin(), order_.end(), 0);
  std::ranges::sort(order_, [&](size_t a, size_t b) {
    return std::tie(tensors[b].dtype, tensors[a].name) < std::tie(tensors[a].dtype, tensors[b].name);
  });

  before_ = "{\"__metadata__\":{";
  for (const auto& [key, value] : metadata) {
    format::append_json_string(before_, key);
    before_ += ':';
    format::append_json_string(before_, value);
    before_ += ',';
  }
  format::append_json_string(before_, kSafetensorsChecksums);
  before_ += ":\"";
  behind_ = "\"}";
  uint64_t at = 0;
  std::vector<std::string_view> names;
  for (const size_t index : order_) {
    const Tensor& tensor = tensors[index];
    const auto row = static_cast<int64_t>(index);
    if (const size_t at = format::invalid_utf8(tensor.name); at != std::string::npos) {
      throw Error::invalid("a tensor's name is no UTF-8 text behind '" + tensor.name.substr(0, at) + "'");
    }
    if (tensor.name == kSafetensorsMetadata) throw Error::invalid("that is the name of the metadata, no tensor's", row);
    const std::vector<uint64_t> shape = stored_shape(tensor, row);
    bytes_.push_back(bytes_of(shape, safetensors_dtypes()[tensor.dtype].bits, row));
    const uint64_t begin = at;
    if (__builtin_add_overflow(at, bytes_.back(), &at)) throw Error::invalid("the file's size overflows", row);
    behind_ += ',';
    append_tensor(behind_, tensor, shape, begin, at);
    names.push_back(tensor.name);
  }
  std::ranges::sort(names);
  if (std::ranges::adjacent_find(names) != names.end()) throw Error::invalid("two tensors of one name");
  behind_ += '}';

  // Where data begin decides how many cells they touch, and so how long the checksums are: more room until all fits.
  data_begin_ = kSafetensorsDataAt;
  for (;;) {
    const uint64_t needed = kSafetensorsLengthBytes + before_.size() + checksum_text_bytes(count_blocks(data_begin_)) +
                            behind_.size() + kSafetensorsLeastPadding;
    if (needed <= data_begin_) break;
    data_begin_ = align_up(needed - kSafetensorsDataAt, kBlock) + kSafetensorsDataAt;
  }
  if (data_begin_ - kSafetensorsLengthBytes > kMostSafetensorsHeader) {
    throw Error::invalid("the header would have " + std::to_string(data_begin_ - kSafetensorsLengthBytes) +
                         " bytes, readers take " + std::to_string(kMostSafetensorsHeader) +
                         ": put fewer tensors, or shorter names, into a file");
  }
  file_bytes_ = data_begin_ + at;
}

uint64_t SafetensorsLayout::count_blocks(uint64_t data_begin) const {
  uint64_t blocks = 0, at = data_begin;
  for (const uint64_t bytes : bytes_) {
    blocks += format::cells(at, at + bytes);
    at += bytes;
  }
  return blocks;
}

std::string SafetensorsLayout::head(std::vector<uint32_t> blocks) const {
  if (blocks.size() != count_blocks(data_begin_)) throw Error::invalid("checksums that do not fit the tensors");
  SafetensorsChecksums checksums{0, std::move(blocks)};
  const uint64_t length = data_begin_ - kSafetensorsLengthBytes;
  std::string head(reinterpret_cast<const char*>(&length), sizeof length);
  head += before_;
  const uint64_t text_at = head.size();
  const std::string text = checksum_text(checksums);
  head.append(text).append(behind_);
  head.append(data_begin_ - head.size(), ' ');
  checksums.head = head_checksum(head, text_at);
  return head.replace(text_at, text.size(), checksum_text(checksums));
}

}  // namespace vescale_ckpt::hf
