// Makes the bytes of an index from packed tables, for the file beside `.metadata` or for any checkpoint's metadata.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/large_vector.h"
#include "metadata/catalog.h"
#include "metadata/index_format.h"
#include "metadata/record_locations.h"
#include "state/inventory.h"

namespace vescale_ckpt::metadata {

// Chunks repeat: keys of equal shapes and chunks share their dims, and columns their codes and values. Throws Error
// (invalid) if a location is invalid.
class IndexImage {
 public:
  IndexImage(const Catalog& catalog, const RecordLocations& locations, std::string_view save_id);

  uint64_t bytes() const { return checksum_at_ + sizeof(uint32_t); }
  // Writes the file's content to `out`. `pickle_bytes` and `pickle_crc` are those of the `.metadata` that the index
  // belongs to.
  void write(std::byte* out, uint64_t pickle_bytes, uint32_t pickle_crc) const;

 private:
  // Words of which equal ranges are stored once.
  class Words {
   public:
    // Returns where these words start.
    uint64_t add(std::span<const uint64_t> words);
    std::vector<uint64_t> words;

   private:
    std::unordered_multimap<uint64_t, uint64_t> known_;  // checksum and length of a range, where it starts
  };

  void add_strings(const Catalog& catalog, std::span<const std::string> files, std::string_view save_id);
  void add_key(const Catalog& catalog, const Catalog::Key& key, std::span<const RecordLocation> locations);
  uint64_t dims_of(const Catalog& catalog, const Catalog::Key& key);
  void add_column();  // of numbers_
  void lay_out();

  std::vector<uint32_t> dtype_index_;  // index among the names of dtypes of each dtype code
  std::vector<uint64_t> ends_;
  std::string text_;
  std::vector<IndexKey> keys_;
  Words dims_;
  std::vector<IndexColumn> columns_;
  Words words_;
  LargeVector<uint32_t> crcs_;
  std::vector<uint64_t> boxes_, numbers_, codes_, values_, packed_;  // reused for each key
  IndexHeader header_{};
  uint64_t checksum_at_ = 0;
};

// Makes an index of rows: chunks of tensors and objects, in any order. Each row has a location in the form of
// RecordLocations. Throws Error (invalid) if rows of one name contradict each other.
std::vector<std::byte> index_of_rows(const state::Inventory& rows, std::span<const int64_t> locations,
                                     const std::vector<std::string>& files, std::string_view save_id = {});

}  // namespace vescale_ckpt::metadata
