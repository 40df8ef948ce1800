// Looks up what a checkpoint holds, and where, by name and box.
//
// The content of an index is untrusted: every offset and number is checked against its bounds before it is used. A
// failed check throws Error (corrupt). Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/numbered_strings.h"
#include "metadata/index_format.h"
#include "metadata/record_locations.h"
#include "state/inventory.h"

namespace vescale_ckpt::metadata {

class Index {
 public:
  // Takes the content of the file beside `.metadata` (metadata/index_image.h), and checks its checksum. `path` is for
  // messages. Throws Error (corrupt).
  explicit Index(std::vector<std::byte> image, std::string path = {});
  Index(const Index&) = delete;
  Index& operator=(const Index&) = delete;

  struct Key {
    std::string_view name;
    state::ItemKind kind;
    std::string_view dtype;             // empty for objects
    std::optional<uint8_t> dtype_code;  // the engine's code; none for an unknown dtype
    uint16_t flags;
    std::span<const int64_t> shape;
    uint64_t chunks;  // an object has one
    uint64_t number, dims, first_crc;
  };

  std::string_view save_id() const { return save_id_; }
  // Whether the index belongs to the `.metadata` of `metadata_bytes` bytes, trailer included, that ends in `trailer`.
  bool matches(std::span<const std::byte> trailer, uint64_t metadata_bytes) const;

  // Throws Error (corrupt) if it lists more chunks than the `.metadata` that it belongs to can: keys share what they
  // have, so a few bytes may claim any number. Call it before all are listed.
  void check_counts() const;

  uint64_t size() const { return header_.tables[IndexHeader::kKeys].count; }
  Key key(uint64_t number) const;
  std::optional<Key> find(std::string_view name) const;

  // Calls `found(chunk, box)` with each chunk of a tensor that overlaps. `box` is offset[ndim], size[ndim].
  void overlaps(const Key& key, std::span<const int64_t> offset, std::span<const int64_t> size,
                const std::function<void(uint64_t chunk, const int64_t* box)>& found) const;
  // Returns offset[ndim], size[ndim] of a chunk of a tensor. Chunks are in the order of their offsets.
  std::span<const int64_t> box(const Key& key, uint64_t chunk) const;
  RecordLocation location(const Key& key, uint64_t chunk) const;

  uint64_t files() const { return header_.tables[IndexHeader::kEnds].count - 1 - header_.dtypes; }
  // Returns the end of the last record in each file, which is the file's least length. Reads every key.
  std::vector<uint64_t> file_ends() const;
  std::string_view file(uint32_t number) const { return string(1 + header_.dtypes + uint64_t{number}); }

 private:
  [[noreturn]] void corrupt(const char* what) const;
  void expect(bool true_of_sound_ones, const char* what) const {
    if (!true_of_sound_ones) corrupt(what);
  }
  uint64_t column(uint64_t number, uint64_t chunk) const;
  uint64_t code(const IndexColumn& column, uint64_t chunk) const;
  void check_inside(const Key& key, const int64_t* box) const;
  // Returns the elements from `first` on of a table, which must have them.
  template <typename Element>
  const Element* elements(IndexHeader::Section section, uint64_t first) const;
  std::string_view text(uint64_t begin, uint64_t bytes) const;
  std::string_view string(uint64_t number) const;

  const std::vector<std::byte> content_;
  const std::string path_;
  IndexHeader header_;
  std::string_view save_id_;
  NumberedStrings names_;  // of the keys
  std::vector<std::string_view> dtypes_;
  std::vector<std::optional<uint8_t>> dtype_codes_;
};

}  // namespace vescale_ckpt::metadata
