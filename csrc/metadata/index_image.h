// Makes the bytes of an index from packed tables, for the file beside `.metadata` or for any checkpoint's metadata.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "metadata/catalog.h"
#include "metadata/index_format.h"
#include "metadata/record_locations.h"
#include "state/inventory.h"

namespace vescale_ckpt::metadata {

// A view of its arguments. `pickle_bytes` and `pickle_crc` are those of the `.metadata` that the index belongs to.
class IndexImage {
 public:
  IndexImage(const Catalog& catalog, const RecordLocations& locations, std::string_view save_id, uint64_t pickle_bytes,
             uint32_t pickle_crc);

  uint64_t bytes() const { return header_.file_bytes; }
  // Writes the file's content to `out`. Throws Error (invalid) if a location is invalid.
  void write(std::byte* out) const;

 private:
  void write_strings(std::byte* out) const;
  void write_keys(std::byte* out) const;

  const Catalog& catalog_;
  const RecordLocations& locations_;
  std::string_view save_id_;
  std::vector<uint32_t> dtype_index_;  // index in dtypes_ of each dtype code
  std::vector<uint8_t> dtypes_;        // codes of the dtypes in use
  IndexHeader header_{};
};

// Makes an index of rows: chunks of tensors and objects, in any order. Each row has a location in the form of
// RecordLocations. Throws Error (invalid) if rows of one name contradict each other.
std::vector<std::byte> index_of_rows(const state::Inventory& rows, std::span<const int64_t> locations,
                                     const std::vector<std::string>& files, std::string_view save_id = {});

}  // namespace vescale_ckpt::metadata
