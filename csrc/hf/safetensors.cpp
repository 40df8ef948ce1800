#include "hf/safetensors.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdio>
#include <cstring>

#include "base/crc32.h"
#include "base/error.h"
#include "format/json.h"

namespace vescale_ckpt::hf {
namespace {

constexpr std::array kDTypes = {
    SafetensorsDType{"BOOL", 8, "bool"},
    SafetensorsDType{"F4", 4, "float4_e2m1fn_x2"},
    SafetensorsDType{"F6_E2M3", 6, ""},
    SafetensorsDType{"F6_E3M2", 6, ""},
    SafetensorsDType{"U8", 8, "uint8"},
    SafetensorsDType{"I8", 8, "int8"},
    SafetensorsDType{"F8_E5M2", 8, "float8_e5m2"},
    SafetensorsDType{"F8_E4M3", 8, "float8_e4m3fn"},
    SafetensorsDType{"F8_E8M0", 8, "float8_e8m0fnu"},
    SafetensorsDType{"F8_E4M3FNUZ", 8, "float8_e4m3fnuz"},
    SafetensorsDType{"F8_E5M2FNUZ", 8, "float8_e5m2fnuz"},
    SafetensorsDType{"I16", 16, "int16"},
    SafetensorsDType{"U16", 16, "uint16"},
    SafetensorsDType{"F16", 16, "float16"},
    SafetensorsDType{"BF16", 16, "bfloat16"},
    SafetensorsDType{"I32", 32, "int32"},
    SafetensorsDType{"U32", 32, "uint32"},
    SafetensorsDType{"F32", 32, "float32"},
    SafetensorsDType{"C64", 64, "complex64"},
    SafetensorsDType{"F64", 64, "float64"},
    SafetensorsDType{"I64", 64, "int64"},
    SafetensorsDType{"U64", 64, "uint64"},
};

constexpr uint64_t kTorchMostDims = 64;

// As it stands in messages: short.
std::string shown(std::string_view name) {
  constexpr size_t kMost = 100;
  return "\"" + std::string(name.substr(0, kMost)) + (name.size() > kMost ? "…\"" : "\"");
}

std::string shown(std::span<const uint64_t> shape) {
  constexpr size_t kMost = 16;
  std::string text = "[";
  for (size_t i = 0; i < std::min(kMost, shape.size()); ++i) text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  return text + (shape.size() > kMost ? ", …]" : "]");
}

// The head's checksum in hexadecimal, then those of the blocks in base64 without padding.
constexpr size_t kHeadDigits = 8;
constexpr std::string_view kHexDigits = "0123456789abcdef";
constexpr std::string_view kDigits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

constexpr std::array<uint8_t, 256> kValues = [] {
  std::array<uint8_t, 256> values{};
  values.fill(0xFF);
  for (size_t i = 0; i < kDigits.size(); ++i) values[static_cast<unsigned char>(kDigits[i])] = static_cast<uint8_t>(i);
  return values;
}();

uint64_t blocks_of(const SafetensorsHeader::Tensor& tensor) {
  return format::cells(tensor.begin, tensor.end);
}

}  // namespace

std::span<const SafetensorsDType> safetensors_dtypes() {
  return kDTypes;
}

std::optional<uint32_t> safetensors_dtype_named(std::string_view torch_name) {
  const auto all = safetensors_dtypes();
  const auto found = std::ranges::find(all, torch_name, &SafetensorsDType::torch);
  if (torch_name.empty() || found == all.end()) return std::nullopt;
  return static_cast<uint32_t>(found - all.begin());
}

// Fills one header.
class SafetensorsHeader::Parser {
 public:
  Parser(std::string_view head, uint64_t file_bytes, const std::string& path, SafetensorsHeader& header)
      : head_(head),
        file_bytes_(file_bytes),
        path_(path),
        header_(header),
        json_(head.substr(kSafetensorsLengthBytes)) {
    header_.data_begin_ = head.size();
    header_.path_ = path;
  }

  void run() {
    const std::string_view text = head_.substr(kSafetensorsLengthBytes);
    if (const size_t at = format::invalid_utf8(text); at != text.npos) damaged("not UTF-8", at);
    try {
      if (text.empty() || text[0] != '{') json_.fail("it does not start with '{'");
      json_.open('{');
      bool has_metadata = false;
      while (json_.more('}')) {
        const size_t at = json_.at();
        std::string key = json_.key();
        if (key != kSafetensorsMetadata) {
          read_tensor(std::move(key));
          continue;
        }
        if (has_metadata) json_.fail("a second \"__metadata__\"", at);
        has_metadata = true;
        read_metadata();
      }
      padding_at_ = json_.at();
      json_.end(' ');
    } catch (const format::JsonError& error) {
      damaged(error.what(), error.at);
    }
    check_names();
    check_tiling();
  }

  void take_checksums() {
    const uint64_t padding = head_.size() - kSafetensorsLengthBytes - padding_at_;
    if (header_.data_begin_ % kBlock != kSafetensorsDataAt || padding < kSafetensorsLeastPadding) {
      return;  // written anew by another tool, which kept our metadata
    }
    uint64_t blocks = 0;
    for (Tensor& tensor : header_.tensors_) {
      tensor.first_block = blocks;
      blocks += blocks_of(tensor);
    }
    if (!checksums_) {
      if (would_be_ours(checksum_text_bytes(blocks))) damaged("the name of its checksums is damaged", 0);
      return;
    }
    const uint64_t text_at = checksums_->text_at, text_bytes = checksums_->text_bytes;
    auto found = parse_checksum_text(head_.substr(text_at, text_bytes));
    if (!found) damaged("its checksums are no checksums", text_at - kSafetensorsLengthBytes);
    if (found->head != head_checksum(head_, text_at)) {
      damaged("checksum mismatch: damaged, or edited by another tool", 0);
    }
    if (blocks != found->blocks.size()) damaged("its checksums do not fit its tensors", 0);
    header_.blocks_ = std::move(found->blocks);
  }

 private:
  // An entry of the metadata without escapes: where its key and its value are in the head.
  struct Entry {
    uint64_t key_at, text_at, text_bytes;
  };

  // Whether an entry holds the checksums but for its name, so that a flipped bit there does not end all checking. One
  // is looked at: a hostile header may have a million.
  bool would_be_ours(uint64_t text_bytes) const {
    const auto entry = std::ranges::find(of_that_length_, text_bytes, &Entry::text_bytes);
    if (entry == of_that_length_.end()) return false;
    const auto found = parse_checksum_text(head_.substr(entry->text_at, entry->text_bytes));
    if (!found) return false;
    std::string mended(head_);
    mended.replace(entry->key_at, kSafetensorsChecksums.size(), kSafetensorsChecksums);
    return found->head == head_checksum(mended, entry->text_at);
  }

  [[noreturn]] void damaged(const std::string& what, size_t at) const {
    const uint64_t offset = kSafetensorsLengthBytes + at;
    throw Error::corrupt("the header of " + path_ + ": " + what + " (at offset " + std::to_string(offset) + ")", path_,
                         offset);
  }

  [[noreturn]] void lies(const Tensor& tensor, const std::string& what) const {
    throw Error(Error::Kind::invalid, "tensor " + shown(tensor.name) + " in the header of " + path_ + ": " + what,
                path_);
  }

  // Texts by their keys, of which the last counts, or null: what the library takes.
  void read_metadata() {
    if (json_.null()) return;
    auto& metadata = header_.metadata_.emplace();
    json_.open('{');
    while (json_.more('}')) {
      const uint64_t key_at = kSafetensorsLengthBytes + json_.at() + 1;
      std::string key = json_.key();
      const size_t before = json_.at();
      std::string value = json_.string();
      // Escapes, which checksums never have, make the text another one.
      const Entry entry{key_at, kSafetensorsLengthBytes + json_.at() - 1 - value.size(), value.size()};
      if (key == kSafetensorsChecksums) {
        if (checksums_) json_.fail("a second \"" + key + "\"", before);
        checksums_ = entry;
        continue;
      }
      if (key.size() == kSafetensorsChecksums.size()) of_that_length_.push_back(entry);
      metadata.emplace_back(std::move(key), std::move(value));
    }
  }

  void read_tensor(std::string name) {
    Tensor tensor{};
    tensor.name = std::move(name);
    tensor.first_dim = header_.shapes_.size();
    bool has_dtype = false, has_shape = false, has_offsets = false;
    const auto once = [&](bool& had, const std::string& field) {
      if (had) json_.fail("tensor " + shown(tensor.name) + " has \"" + field + "\" twice");
      had = true;
    };
    json_.open('{');
    while (json_.more('}')) {
      const std::string field = json_.key();
      if (field == "dtype") {
        once(has_dtype, field);
        read_dtype(tensor);
      } else if (field == "shape") {
        once(has_shape, field);
        json_.open('[');
        while (json_.more(']')) header_.shapes_.push_back(json_.whole_number());
        tensor.dims = static_cast<uint32_t>(header_.shapes_.size() - tensor.first_dim);
      } else if (field == "data_offsets") {
        once(has_offsets, field);
        read_offsets(tensor);
      } else {
        json_.skip();
      }
    }
    for (const auto& [has, field] :
         {std::pair(has_dtype, "dtype"), std::pair(has_shape, "shape"), std::pair(has_offsets, "data_offsets")}) {
      if (!has) json_.fail("tensor " + shown(tensor.name) + " has no \"" + field + "\"");
    }
    check_size(tensor);
    header_.tensors_.push_back(std::move(tensor));
  }

  void read_dtype(Tensor& tensor) {
    const size_t at = json_.at();
    const std::string dtype = json_.string();
    const auto known = std::ranges::find(kDTypes, dtype, &SafetensorsDType::name);
    if (known == kDTypes.end())
      json_.fail("tensor " + shown(tensor.name) + " has the unknown dtype " + shown(dtype), at);
    tensor.dtype = static_cast<uint32_t>(known - kDTypes.begin());
  }

  void read_offsets(Tensor& tensor) {
    uint64_t offsets[2] = {0, 0};
    json_.open('[');
    for (uint64_t& offset : offsets) {
      if (!json_.more(']')) json_.fail("tensor " + shown(tensor.name) + " has fewer than two offsets");
      offset = json_.whole_number();
    }
    if (json_.more(']')) json_.fail("tensor " + shown(tensor.name) + " has more than two offsets");
    const auto [begin, end] = offsets;
    if (begin > end) {
      lies(tensor, "its data end at " + std::to_string(end) + ", before they begin at " + std::to_string(begin));
    }
    if (__builtin_add_overflow(begin, header_.data_begin_, &tensor.begin) ||
        __builtin_add_overflow(end, header_.data_begin_, &tensor.end)) {
      lies(tensor, "its offsets overflow");
    }
  }

  void check_size(const Tensor& tensor) const {
    const auto shape = header_.shape(tensor);
    const SafetensorsDType& dtype = header_.dtype(tensor);
    uint64_t bits = dtype.bits;
    for (const uint64_t size : shape) {
      if (__builtin_mul_overflow(bits, size, &bits)) {
        lies(tensor, std::string(dtype.name) + " of shape " + shown(shape) + " overflows 64 bits");
      }
    }
    if (bits % 8 != 0) lies(tensor, std::string(dtype.name) + " of shape " + shown(shape) + " ends inside a byte");
    if (bits / 8 != tensor.end - tensor.begin) {
      lies(tensor, std::string(dtype.name) + " of shape " + shown(shape) + " is " + std::to_string(bits / 8) +
                       " bytes, its offsets have " + std::to_string(tensor.end - tensor.begin));
    }
  }

  // By sorting: a table of hashes is one that a hostile header can fill with collisions.
  void check_names() const {
    std::vector<std::string_view> names;
    names.reserve(header_.tensors_.size());
    for (const Tensor& tensor : header_.tensors_) names.push_back(tensor.name);
    std::ranges::sort(names);
    if (const auto twice = std::ranges::adjacent_find(names); twice != names.end()) {
      throw Error(Error::Kind::invalid, "the header of " + path_ + " has tensor " + shown(*twice) + " twice", path_);
    }
  }

  void check_tiling() {
    auto& tensors = header_.tensors_;
    // Empty ones that begin at one place keep the order of the header.
    std::ranges::stable_sort(
        tensors, [](const Tensor& a, const Tensor& b) { return std::tie(a.begin, a.end) < std::tie(b.begin, b.end); });
    uint64_t at = header_.data_begin_;
    for (const Tensor& tensor : tensors) {
      const std::string begin = std::to_string(tensor.begin - header_.data_begin_);
      const std::string before = std::to_string(at - header_.data_begin_);
      if (tensor.begin < at) lies(tensor, "its data begin at " + begin + ", inside of others that end at " + before);
      if (tensor.begin > at) {
        lies(tensor,
             "its data begin at " + begin + ", those before end at " + before + ": the bytes between belong to nobody");
      }
      at = tensor.end;
    }
    if (at > file_bytes_) {
      throw Error::corrupt("file " + path_ + " is truncated: it has " + std::to_string(file_bytes_) +
                               " bytes, its header tells of " + std::to_string(at),
                           path_, file_bytes_);
    }
    if (at < file_bytes_) {
      throw Error::corrupt("file " + path_ + " has " + std::to_string(file_bytes_ - at) +
                               " bytes behind its last tensor that belong to nobody",
                           path_, at);
    }
  }

  std::string_view head_;
  uint64_t file_bytes_;
  const std::string& path_;
  SafetensorsHeader& header_;
  format::JsonReader json_;
  size_t padding_at_ = 0;  // in the JSON
  std::optional<Entry> checksums_;
  std::vector<Entry> of_that_length_;  // other entries, with keys as long as ours
};

SafetensorsHeader SafetensorsHeader::parse(std::string_view head, uint64_t file_bytes, const std::string& path,
                                           bool checksums) {
  SafetensorsHeader header;
  Parser parser(head, file_bytes, path, header);
  parser.run();
  if (checksums) parser.take_checksums();
  return header;
}

uint64_t SafetensorsHeader::head_bytes(std::string_view first, uint64_t file_bytes, const std::string& path) {
  if (first.size() < kSafetensorsLengthBytes || file_bytes < kSafetensorsLengthBytes) {
    throw Error::corrupt("file " + path + " has " + std::to_string(file_bytes) +
                             " bytes, too few for the length of a safetensors header",
                         path, 0);
  }
  uint64_t length = 0;
  std::memcpy(&length, first.data(), sizeof length);
  if (length > kMostSafetensorsHeader) {
    throw Error(Error::Kind::invalid,
                path + " is no safetensors file, or a hostile one: its header would have " + std::to_string(length) +
                    " bytes, at most " + std::to_string(kMostSafetensorsHeader) + " are allowed",
                path);
  }
  if (length > file_bytes - kSafetensorsLengthBytes) {
    throw Error::corrupt("file " + path + " is truncated: it has " + std::to_string(file_bytes) +
                             " bytes, its header alone needs " + std::to_string(kSafetensorsLengthBytes + length),
                         path, file_bytes);
  }
  return kSafetensorsLengthBytes + length;
}

std::vector<int64_t> SafetensorsHeader::torch_shape(const Tensor& tensor) const {
  const auto sizes = shape(tensor);
  const SafetensorsDType& of = dtype(tensor);
  const auto refuse = [&](const std::string& why) {
    throw Error(Error::Kind::invalid, "tensor " + shown(tensor.name) + " in " + path_ + ": " + why, path_);
  };
  if (of.torch.empty()) refuse("torch has no dtype for " + std::string(of.name));
  if (sizes.size() > kTorchMostDims) refuse("torch has no shapes of " + std::to_string(sizes.size()) + " dimensions");
  std::vector<int64_t> result;
  int64_t stride = 1;  // also for an empty tensor
  for (const uint64_t size : sizes) {
    if (size > INT64_MAX ||
        __builtin_mul_overflow(stride, static_cast<int64_t>(std::max<uint64_t>(size, 1)), &stride)) {
      refuse("torch has no shape " + shown(sizes));
    }
    result.push_back(static_cast<int64_t>(size));
  }
  if (of.bits < 8) {
    const auto in_a_byte = static_cast<int64_t>(8 / of.bits);
    if (result.empty() || result.back() % in_a_byte != 0) {
      refuse("torch has " + std::to_string(in_a_byte) + " " + std::string(of.name) +
             " in an element, of which no whole number is in the last dimension of " + shown(sizes));
    }
    result.back() /= in_a_byte;
  }
  return result;
}

std::span<const uint32_t> SafetensorsHeader::blocks(const Tensor& tensor) const {
  if (blocks_.empty()) return {};
  return std::span(blocks_).subspan(tensor.first_block, blocks_of(tensor));
}

uint64_t checksum_text_bytes(uint64_t blocks) {
  return kHeadDigits + (blocks * sizeof(uint32_t) * 4 + 2) / 3;
}

std::string checksum_text(const SafetensorsChecksums& checksums) {
  char head[kHeadDigits + 1];
  std::snprintf(head, sizeof head, "%08x", checksums.head);
  std::string text(head, kHeadDigits);
  text.reserve(checksum_text_bytes(checksums.blocks.size()));
  uint32_t pending = 0;
  unsigned bits = 0;
  for (const std::byte byte : std::as_bytes(std::span(checksums.blocks))) {
    pending = pending << 8 | std::to_integer<uint32_t>(byte);
    for (bits += 8; bits >= 6;) {
      bits -= 6;
      text += kDigits[pending >> bits & 0x3F];
    }
  }
  if (bits != 0) text += kDigits[pending << (6 - bits) & 0x3F];
  return text;
}

std::optional<SafetensorsChecksums> parse_checksum_text(std::string_view text) {
  if (text.size() < kHeadDigits) return std::nullopt;
  SafetensorsChecksums checksums;
  for (const char digit : text.substr(0, kHeadDigits)) {
    const size_t value = kHexDigits.find(digit);
    if (value == kHexDigits.npos) return std::nullopt;
    checksums.head = checksums.head << 4 | static_cast<uint32_t>(value);
  }
  std::string bytes;
  bytes.reserve(text.size() / 4 * 3 + 3);
  uint32_t pending = 0;
  unsigned bits = 0;
  for (const char digit : text.substr(kHeadDigits)) {
    const uint8_t value = kValues[static_cast<unsigned char>(digit)];
    if (value > 0x3F) return std::nullopt;
    pending = pending << 6 | value;
    bits += 6;
    if (bits >= 8) {
      bits -= 8;
      bytes += static_cast<char>(pending >> bits);
    }
  }
  const uint64_t blocks = bytes.size() / sizeof(uint32_t);
  if (checksum_text_bytes(blocks) != text.size() || (pending & ((1u << bits) - 1)) != 0) return std::nullopt;
  checksums.blocks.resize(blocks);
  if (blocks != 0) std::memcpy(checksums.blocks.data(), bytes.data(), blocks * sizeof(uint32_t));
  return checksums;
}

uint32_t head_checksum(std::string_view head, uint64_t text_at) {
  const std::string zeros(kHeadDigits, '0');
  uint32_t crc = crc32(0, head.data(), text_at);
  crc = crc32(crc, zeros.data(), zeros.size());
  return crc32(crc, head.data() + text_at + kHeadDigits, head.size() - text_at - kHeadDigits);
}

}  // namespace vescale_ckpt::hf
