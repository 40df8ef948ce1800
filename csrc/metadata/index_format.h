// Defines the index file's tables as they lie in it. docs/format.md explains them.
#pragma once

#include <cstdint>
#include <string_view>

namespace vescale_ckpt::metadata {

struct IndexHeader {
  static constexpr std::string_view kMagic = "VSCKIDX1";
  static constexpr uint32_t kVersion = 3;
  enum Section { kEnds, kText, kKeys, kDims, kColumns, kWords, kCrcs, kSections };

  struct Table {
    uint64_t at;     // offset in the file
    uint64_t count;  // number of elements
  };

  char magic[8];
  uint32_t version;
  uint32_t dtypes;        // so many strings after the first name dtypes; the others name files
  uint64_t pickle_bytes;  // length of the pickle in the .metadata that it belongs to
  uint32_t pickle_crc;
  uint32_t reserved;
  Table tables[kSections];
};
static_assert(sizeof(IndexHeader) == 144);

struct IndexKey {
  uint64_t name;  // start in the text
  uint64_t dims;  // start of shape[ndim] in the dims; its chunks follow
  uint64_t first_crc;
  uint64_t chunks;
  uint32_t name_bytes;
  uint32_t ndim;
  uint32_t dtype;  // index into the names of dtypes
  uint16_t kind;   // 0 an object, 1 a tensor, 2 a sharded tensor
  uint16_t flags;  // flags of an item (state/inventory.h)
};
static_assert(sizeof(IndexKey) == 48);

// Gives a number for each chunk of a key. Chunk i has base + i * step (modulo 2^64), and if `width` is not 0, plus a
// value: its code, or if there are `values`, value number code. A code is bits i * width .. (i + 1) * width of the
// words from `codes` on, from the lowest bit of a word to its highest.
struct IndexColumn {
  uint64_t base;
  uint64_t step;
  uint64_t codes;   // start in the words
  uint64_t values;  // start in the words
  uint32_t width;
  uint32_t value_count;  // 0: codes are the values

  static constexpr uint32_t kMostWidth = 63;
};
static_assert(sizeof(IndexColumn) == 40);

// Columns of each key: data file (index into the names of files, plus kNoCrc if there is no CRC-32), offset and length
// of the record.
constexpr uint64_t kIndexColumns = 3;
constexpr uint32_t kNoCrc = uint32_t{1} << 31;

constexpr uint64_t kIndexElement[IndexHeader::kSections] = {
    8, 1, sizeof(IndexKey), 8, sizeof(IndexColumn), 8, sizeof(uint32_t)};

}  // namespace vescale_ckpt::metadata
