// Defines the index file's tables as they lie in it. docs/format.md explains them.
#pragma once

#include <cstdint>
#include <string_view>

namespace vescale_ckpt::metadata {

struct IndexHeader {
  static constexpr std::string_view kMagic = "VSCKIDX1";
  static constexpr uint32_t kVersion = 1;
  enum Section { kEnds, kText, kSlots, kKeys, kDims, kPlaces, kSections };

  struct Table {
    uint64_t at;     // offset in the file
    uint64_t count;  // number of elements
  };

  char magic[8];
  uint32_t version;
  uint32_t piece_bytes;
  uint64_t file_bytes;
  uint64_t pickle_bytes;  // length of the pickle in the .metadata that it belongs to
  uint32_t pickle_crc;
  uint32_t dtypes;     // so many strings after the first name dtypes; the others name files
  uint64_t checksums;  // offset of the pieces' checksums
  Table tables[kSections];
  uint32_t checksums_crc;
  uint32_t header_crc;  // CRC-32 of all bytes before it
};
static_assert(sizeof(IndexHeader) == 152);

struct IndexSlot {
  uint32_t crc;  // CRC-32 of the name
  uint32_t key;  // index of the key plus 1; 0: none
};

struct IndexKey {
  uint64_t name;  // start in the text
  uint64_t dims;  // start of shape[ndim] in the dims; the tree of its chunks follows
  uint64_t first_place;
  uint64_t chunks;
  uint32_t name_bytes;
  uint32_t ndim;
  uint32_t dtype;  // index into the names of dtypes
  uint16_t kind;   // 0 an object, 1 a tensor, 2 a sharded tensor
  uint16_t flags;  // flags of an item (state/inventory.h)
};
static_assert(sizeof(IndexKey) == 48);

struct IndexPlace {
  static constexpr uint32_t kNoCrc = uint32_t{1} << 31;
  uint64_t offset, length;  // place of the record
  uint32_t crc;
  uint32_t file;  // index into the names of files, plus kNoCrc if there is no CRC-32
};
static_assert(sizeof(IndexPlace) == 24);

constexpr uint64_t kIndexElement[IndexHeader::kSections] = {
    8, 1, sizeof(IndexSlot), sizeof(IndexKey), 8, sizeof(IndexPlace)};

}  // namespace vescale_ckpt::metadata
