// Makes the record of one tensor as torch.save writes it: prologue (zip headers and a small pickle), raw bytes,
// epilogue (checksum and directory). Except for the serialization id, it equals byte for byte what torch 2.13 writes
// for a contiguous CPU tensor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "format/archive.h"

namespace vescale_ckpt::format {

struct DType {
  std::string_view name;     // the name in torch.<name>
  std::string_view storage;  // legacy storage class in the pickle; empty: UntypedStorage and the dtype's name
  uint32_t item_bytes;
};

// Returns all dtypes that torch.save can store. A table's "dtype" column is an index into this.
std::span<const DType> dtypes();

// Returns the index of torch.<name>; nullopt if there is no such dtype.
std::optional<uint8_t> dtype_named(std::string_view name);

// Returns the bytes of a contiguous tensor. Throws Error(invalid) on a negative size or overflow.
uint64_t tensor_bytes(const DType& dtype, std::span<const int64_t> sizes);
// Whether elements lie without gaps in C's order. A dimension of one element may have any stride.
bool contiguous(std::span<const int64_t> sizes, std::span<const int64_t> strides);
// Returns the strides of a contiguous tensor as torch has them, in elements.
std::vector<int64_t> contiguous_strides(std::span<const int64_t> sizes);

// The framing of one tensor; immutable and shared by all tensors of equal dtype and shape.
class TensorRecord {
 public:
  TensorRecord(const DType& dtype, std::span<const int64_t> sizes);

  uint64_t body_bytes() const { return body_bytes_; }
  const std::string& prologue() const { return prologue_; }
  uint64_t epilogue_bytes() const { return epilogue_.size(); }
  uint64_t total_bytes() const { return prologue_.size() + body_bytes_ + epilogue_.size(); }
  // Writes the epilogue of a body with checksum `crc` to `out`, epilogue_bytes() long.
  void write_epilogue(uint32_t crc, std::byte* out) const;
  // Whether `actual` is an epilogue of such a body, by this engine or by torch.save (their serialization ids differ).
  bool epilogue_matches(uint32_t crc, std::span<const std::byte> actual) const;
  // Returns the checksum in an epilogue of the right length.
  uint32_t claimed_crc(std::span<const std::byte> epilogue) const;
  // Returns the pickle alone, for records whose archive has another layout (older torch).
  const std::string& pickle() const { return pickle_; }

 private:
  void write_epilogue(uint32_t crc, std::string_view id, std::byte* out) const;
  uint64_t body_bytes_;
  std::string pickle_;
  std::string prologue_;
  std::string epilogue_;  // with zeros in place of the fields below
  size_t crc_field_ = 0, crc_field_central_ = 0, id_field_ = 0, id_crc_field_ = 0, id_crc_field_central_ = 0;
};

// Records by dtype and shape, each built once. Not thread-safe.
class RecordCache {
 public:
  // Throws Error (invalid) for an unknown dtype or an impossible shape.
  std::shared_ptr<const TensorRecord> get(uint32_t dtype, std::span<const int64_t> sizes);

 private:
  std::unordered_map<std::string, std::shared_ptr<const TensorRecord>> records_;
  std::string key_;  // key of the last call; its memory is used again
};

// Makes the record of a plain object as torch.save writes it, from its pickle (protocol 2, without tensors).
std::string object_record(std::string_view pickle);

}  // namespace vescale_ckpt::format
