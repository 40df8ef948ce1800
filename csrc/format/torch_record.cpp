#include "format/torch_record.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>

#include "base/crc32.h"
#include "base/error.h"

namespace vescale_ckpt::format {
namespace {

constexpr std::array kDTypes = {
    DType{"float32", "FloatStorage", 4},
    DType{"float64", "DoubleStorage", 8},
    DType{"float16", "HalfStorage", 2},
    DType{"bfloat16", "BFloat16Storage", 2},
    DType{"int8", "CharStorage", 1},
    DType{"int16", "ShortStorage", 2},
    DType{"int32", "IntStorage", 4},
    DType{"int64", "LongStorage", 8},
    DType{"uint8", "ByteStorage", 1},
    DType{"bool", "BoolStorage", 1},
    DType{"complex64", "ComplexFloatStorage", 8},
    DType{"complex128", "ComplexDoubleStorage", 16},
    DType{"complex32", "", 4},
    DType{"uint16", "", 2},
    DType{"uint32", "", 4},
    DType{"uint64", "", 8},
    DType{"float8_e4m3fn", "", 1},
    DType{"float8_e4m3fnuz", "", 1},
    DType{"float8_e5m2", "", 1},
    DType{"float8_e5m2fnuz", "", 1},
    DType{"float8_e8m0fnu", "", 1},
    DType{"float4_e2m1fn_x2", "", 1},
    DType{"bits8", "", 1},
    DType{"bits16", "", 2},
    DType{"bits1x8", "", 1},
    DType{"bits2x4", "", 1},
    DType{"bits4x2", "", 1},
};

// The serialization id consists of two numbers of 20 digits. torch makes the first a hash of the entries' names, and
// the second a hash of their checksums. Readers only log the id. Here it has torch 2.13's hash of the names, and the
// body's checksum.
constexpr std::string_view kIdOfNames = "15728199511854643026";
constexpr size_t kIdDigits = 40;

// Writes a pickle of protocol 2 like CPython's, in which BINPUT memoizes values.
class Pickle {
 public:
  Pickle() { text_ = "\x80\x02"; }
  Pickle& raw(std::string_view bytes) {
    text_ += bytes;
    return *this;
  }
  Pickle& memo() {
    text_ += 'q';
    text_ += static_cast<char>(memos_++);
    return *this;
  }
  Pickle& global(std::string_view module, std::string_view name) {
    text_ += 'c';
    text_.append(module).append("\n").append(name).append("\n");
    return memo();
  }
  Pickle& text(std::string_view value) {
    text_ += 'X';
    append(static_cast<uint32_t>(value.size()), 4);
    text_ += value;
    return memo();
  }
  Pickle& integer(uint64_t value) {
    if (value <= 0xff) {
      text_ += 'K';
      append(value, 1);
    } else if (value <= 0xffff) {
      text_ += 'M';
      append(value, 2);
    } else if (value <= 0x7fffffff) {
      text_ += 'J';
      append(value, 4);
    } else {
      size_t bytes = 8;  // the highest bit of the two's complement must stay clear
      while (bytes > 1 && (value >> (8 * bytes - 9)) == 0) --bytes;
      text_ += "\x8a";
      text_ += static_cast<char>(bytes);
      append(value, bytes);
    }
    return *this;
  }
  Pickle& tuple(std::span<const int64_t> values) {
    if (values.empty()) return raw(")");
    if (values.size() > 3) text_ += '(';
    for (const int64_t value : values) integer(static_cast<uint64_t>(value));
    text_ += values.size() > 3 ? 't' : static_cast<char>(0x84 + values.size());
    return memo();
  }
  std::string take() { return std::move(text_); }

 private:
  void append(uint64_t value, size_t bytes) { text_.append(reinterpret_cast<const char*>(&value), bytes); }
  std::string text_;
  unsigned memos_ = 0;
};

std::string tensor_pickle(const DType& dtype, std::span<const int64_t> sizes, uint64_t bytes) {
  const bool typed = !dtype.storage.empty();
  Pickle pickle;
  pickle.global("torch._utils", typed ? "_rebuild_tensor_v2" : "_rebuild_tensor_v3").raw("((").text("storage");
  if (typed) {
    pickle.global("torch", dtype.storage);
  } else {
    pickle.global("torch.storage", "UntypedStorage");
  }
  pickle.text("0").text("cpu").integer(typed ? bytes / dtype.item_bytes : bytes).raw("t").memo().raw("Q");
  pickle.integer(0).tuple(sizes).tuple(contiguous_strides(sizes)).raw("\x89");
  pickle.global("collections", "OrderedDict").raw(")R").memo();
  if (!typed) pickle.global("torch", dtype.name);
  return pickle.raw("t").memo().raw("R").memo().raw(".").take();
}

void add_leading_entries(ArchiveWriter& archive, std::string_view pickle) {
  archive.add("data.pkl", pickle);
  archive.add(".format_version", "1");
  archive.add(".storage_alignment", "64");
  archive.add("byteorder", "little");
}

}  // namespace

std::span<const DType> dtypes() {
  return kDTypes;
}

std::optional<uint8_t> dtype_named(std::string_view name) {
  const auto found = std::ranges::find(kDTypes, name, &DType::name);
  if (found == kDTypes.end()) return std::nullopt;
  return static_cast<uint8_t>(found - kDTypes.begin());
}

uint64_t tensor_bytes(const DType& dtype, std::span<const int64_t> sizes) {
  uint64_t bytes = dtype.item_bytes;
  bool empty = false;
  for (const int64_t size : sizes) {
    if (size < 0) throw Error::invalid("negative size " + std::to_string(size) + " in a tensor's shape");
    if (size == 0) {
      empty = true;
    } else if (__builtin_mul_overflow(bytes, static_cast<uint64_t>(size), &bytes) || bytes > (uint64_t{1} << 62)) {
      throw Error::invalid("a tensor's shape overflows 64 bits");
    }
  }
  return empty ? 0 : bytes;
}

bool contiguous(std::span<const int64_t> sizes, std::span<const int64_t> strides) {
  if (std::ranges::find(sizes, 0) != sizes.end()) return true;
  int64_t elements = 1;
  for (size_t dim = sizes.size(); dim-- > 0; elements *= sizes[dim]) {
    if (sizes[dim] != 1 && strides[dim] != elements) return false;
  }
  return true;
}

std::vector<int64_t> contiguous_strides(std::span<const int64_t> sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t dim = sizes.size(); dim-- > 0; stride *= std::max<int64_t>(sizes[dim], 1)) strides[dim] = stride;
  return strides;
}

TensorRecord::TensorRecord(const DType& dtype, std::span<const int64_t> sizes)
    : body_bytes_(tensor_bytes(dtype, sizes)), pickle_(tensor_pickle(dtype, sizes, body_bytes_)) {
  ArchiveWriter archive;
  archive.reserve(2048);
  add_leading_entries(archive, pickle_);
  archive.begin("data/0", body_bytes_);
  prologue_ = archive.bytes();
  archive.end(0);
  archive.add("version", "3\n");
  archive.add(".data/serialization_id", std::string(kIdDigits, '0'));
  archive.finish();
  epilogue_ = archive.bytes().substr(prologue_.size());

  const ArchiveEntry& body = archive.entries()[4];
  const ArchiveEntry& id = archive.entries()[6];
  const size_t start = prologue_.size();
  crc_field_ =
      body.crc_field - start;  // unused if the body is empty: then there is no descriptor, and the checksum is 0
  crc_field_central_ = body.crc_field_central - start;
  id_crc_field_ = id.crc_field - start;
  id_crc_field_central_ = id.crc_field_central - start;
  id_field_ = id_crc_field_ - 4 - kIdDigits;  // behind them are body, signature, checksum
}

void TensorRecord::write_epilogue(uint32_t crc, std::string_view id, std::byte* out) const {
  std::memcpy(out, epilogue_.data(), epilogue_.size());
  if (body_bytes_ != 0) {
    std::memcpy(out + crc_field_, &crc, sizeof crc);
    std::memcpy(out + crc_field_central_, &crc, sizeof crc);
  }
  const uint32_t id_crc = crc32(0, id.data(), id.size());
  std::memcpy(out + id_field_, id.data(), id.size());
  std::memcpy(out + id_crc_field_, &id_crc, sizeof id_crc);
  std::memcpy(out + id_crc_field_central_, &id_crc, sizeof id_crc);
}

void TensorRecord::write_epilogue(uint32_t crc, std::byte* out) const {
  char id[kIdDigits + 1];
  std::snprintf(id, sizeof id, "%.20s%020u", kIdOfNames.data(), crc);
  write_epilogue(crc, {id, kIdDigits}, out);
}

bool TensorRecord::epilogue_matches(uint32_t crc, std::span<const std::byte> actual) const {
  if (actual.size() != epilogue_.size()) return false;
  const std::string_view id(reinterpret_cast<const char*>(actual.data()) + id_field_, kIdDigits);
  std::string expected(epilogue_.size(), '\0');
  write_epilogue(crc, id, reinterpret_cast<std::byte*>(expected.data()));
  return std::memcmp(expected.data(), actual.data(), actual.size()) == 0;
}

uint32_t TensorRecord::claimed_crc(std::span<const std::byte> epilogue) const {
  uint32_t crc = 0;
  if (body_bytes_ != 0) std::memcpy(&crc, epilogue.data() + crc_field_, sizeof crc);
  return crc;
}

std::shared_ptr<const TensorRecord> RecordCache::get(uint32_t dtype, std::span<const int64_t> sizes) {
  if (dtype >= kDTypes.size()) throw Error::invalid("unknown dtype code " + std::to_string(dtype));
  key_.assign(reinterpret_cast<const char*>(&dtype), sizeof dtype);
  key_.append(reinterpret_cast<const char*>(sizes.data()), sizes.size_bytes());
  auto& record = records_[key_];
  if (!record) record = std::make_shared<const TensorRecord>(kDTypes[dtype], sizes);
  return record;
}

std::string object_record(std::string_view pickle) {
  ArchiveWriter archive;
  archive.reserve(1536 + pickle.size());
  add_leading_entries(archive, pickle);
  archive.add("version", "3\n");
  char id[kIdDigits + 1];
  std::snprintf(id, sizeof id, "%020u%020u", 0u, crc32(0, pickle.data(), pickle.size()));
  archive.add(".data/serialization_id", {id, kIdDigits});
  archive.finish();
  return archive.bytes();
}

}  // namespace vescale_ckpt::format
