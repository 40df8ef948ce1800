// Makes chunks from the rows of one class of keys: equal rows of several ranks become one chunk with several holders.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/large_vector.h"
#include "plan/layout.h"

namespace vescale_ckpt::plan {

// One inventory row of each slot of all ranks, sorted by class; rows of one class are in the order of their ranks.
struct Rows {
  std::vector<uint64_t> begin;  // start of each class's rows, and the end
  LargeVector<uint64_t> places;
  LargeVector<Holder> holders;
  std::vector<uint64_t> dims_begin;        // start of each class's words in dims
  LargeVector<int64_t> dims;               // offset[ndim], size[ndim] of row after row
  LargeVector<uint32_t> holders_of_chunk;  // after grouping: the number of holders of each chunk, and one more
};

// One thread uses one Grouping for many classes. Several Groupings may work on different classes of the same rows at a
// time.
class Grouping {
 public:
  Grouping(const Layout& layout, Rows& rows, bool covers_all) : layout_(layout), rows_(rows), covers_all_(covers_all) {}

  // Returns the number of chunks of the class. If the rows do not fit together, writes the reason to `fault`.
  uint32_t group(uint32_t number, std::string& fault);

 private:
  void sort(uint64_t* places, Holder* holders, int64_t* dims, size_t rows, size_t words);

  struct Ordered {
    uint64_t place;
    uint32_t row;
  };

  const Layout& layout_;
  Rows& rows_;
  bool covers_all_;
  std::vector<Ordered> order_;
  std::vector<Holder> holders_copy_;
  std::vector<int64_t> dims_copy_;
};

}  // namespace vescale_ckpt::plan
