// The safetensors format: a u64 length, a JSON header, then the tensors' bytes without a gap. What we add to it:
// docs/format.md. This reads and checks headers; safetensors_layout.h makes them.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/memory.h"
#include "format/checksum_table.h"

namespace vescale_ckpt::hf {

struct SafetensorsDType {
  std::string_view name;   // as in headers
  uint32_t bits;           // an element's
  std::string_view torch;  // as in torch.<name>; empty: torch has none
};

// In the order of the safetensors library, by which it sorts tensors.
std::span<const SafetensorsDType> safetensors_dtypes();

// The number of the dtype that is torch.<name>; nullopt if the format has none.
std::optional<uint32_t> safetensors_dtype_named(std::string_view torch_name);

// Headers of more bytes are refused by every reader.
inline constexpr uint64_t kMostSafetensorsHeader = 100'000'000;
inline constexpr uint64_t kSafetensorsLengthBytes = 8;

inline constexpr std::string_view kSafetensorsMetadata = "__metadata__";
// Its entry that holds checksums (see below).
inline constexpr std::string_view kSafetensorsChecksums = "vescale_ckpt.crc32";

class SafetensorsHeader {
 public:
  struct Tensor {
    std::string name;
    uint32_t dtype;  // index into safetensors_dtypes()
    uint32_t dims;
    size_t first_dim;     // in the shapes
    uint64_t begin, end;  // in the file
    size_t first_block;   // in the blocks
  };
  using Metadata = std::vector<std::pair<std::string, std::string>>;

  // `head`: length and header, head_bytes() of the file. Nothing in it is trusted; what comes out has unique names in
  // UTF-8, known dtypes, sizes that fit the shapes, and tensors that tile the rest of the file exactly.
  // With `checksums` ours are taken, if there are any, and that of the head is checked.
  // Throws Error (corrupt: it is damaged; invalid: it lies), with path and offset.
  static SafetensorsHeader parse(std::string_view head, uint64_t file_bytes, const std::string& path, bool checksums);

  // How many bytes of a file are length and header, from its first eight (fewer, if the file is shorter). Throws Error
  // (corrupt: the file is too short for them; invalid: the header would be too large).
  static uint64_t head_bytes(std::string_view first, uint64_t file_bytes, const std::string& path);

  std::span<const Tensor> tensors() const { return tensors_; }  // in the order of their bytes
  std::span<const uint64_t> shape(const Tensor& tensor) const {
    return std::span(shapes_).subspan(tensor.first_dim, tensor.dims);
  }
  const SafetensorsDType& dtype(const Tensor& tensor) const { return safetensors_dtypes()[tensor.dtype]; }
  // As torch counts: values of which two are in a byte are one element. Throws Error (invalid) for what torch has no
  // dtype or no shape for.
  std::vector<int64_t> torch_shape(const Tensor& tensor) const;

  const std::optional<Metadata>& metadata() const { return metadata_; }  // without our checksums
  uint64_t data_begin() const { return data_begin_; }                    // in the file

  bool has_checksums() const { return !blocks_.empty(); }
  // CRC-32 of the tensor's part of each cell of the file (format/checksum_table.h); empty without checksums.
  std::span<const uint32_t> blocks(const Tensor& tensor) const;

 private:
  class Parser;

  std::vector<Tensor> tensors_;
  std::vector<uint64_t> shapes_;
  std::optional<Metadata> metadata_;
  uint64_t data_begin_ = 0;
  std::vector<uint32_t> blocks_;
  std::string path_;
};

// --- The checksums that we keep in a header: of the header itself, and of the tensors by blocks. As text, because that
// is what `__metadata__` can hold; its length depends on the layout alone, so that room is known before any byte was
// written. Exact form: docs/format.md.

// Where our data begin, behind a multiple of kBlock: as torch's CPU tensors lie behind a page, so that direct I/O needs
// no copy.
inline constexpr uint64_t kSafetensorsDataAt = 64;
// Spaces that end our headers at least. Others pad to a multiple of eight: a header that another tool has written anew,
// with our metadata but other data, ends in fewer.
inline constexpr uint64_t kSafetensorsLeastPadding = 8;

struct SafetensorsChecksums {
  uint32_t head = 0;             // CRC-32 of length and header, with zeros for this checksum's own digits
  std::vector<uint32_t> blocks;  // tensors in the order of their bytes: a block for each cell that one touches
};

uint64_t checksum_text_bytes(uint64_t blocks);
std::string checksum_text(const SafetensorsChecksums& checksums);
// nullopt for what is not such a text.
std::optional<SafetensorsChecksums> parse_checksum_text(std::string_view text);

// SafetensorsChecksums::head of the file's bytes before its data, where the checksums' text starts at text_at.
uint32_t head_checksum(std::string_view head, uint64_t text_at);

}  // namespace vescale_ckpt::hf
