// Rows of a write table for snapshots, and what their bytes were when each was added.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/table_cursor.h"
#include "stage/snapshot.h"
#include "tensors.h"
#include "write/writer.h"

namespace vescale_ckpt::stage {

class SnapshotRows {
 public:
  // `address`: of the first element, for the engine; `memory`: the same for this process. Strides in elements.
  void add(std::string_view dtype, uint64_t address, const std::byte* memory, const Sizes& sizes,
           const Sizes& strides) {
    const uint32_t code = dtype_code(dtype);
    table_.insert(table_.end(), {code, static_cast<int64_t>(address), std::ssize(sizes)});
    table_.insert(table_.end(), sizes.begin(), sizes.end());
    table_.insert(table_.end(), strides.begin(), strides.end());
    const io::Box box(format::dtypes()[code].item_bytes, sizes, Sizes(sizes.size(), 0), sizes, strides);
    std::string bytes(box.bytes(), '\0');
    box.gather(reinterpret_cast<std::byte*>(bytes.data()), 0, box.bytes(), memory);
    bytes_.push_back(std::move(bytes));
    dtypes_.push_back(code);
    sizes_.push_back(sizes);
  }

  std::span<const int64_t> table() const { return table_; }

  void expect_copied(const Snapshot& snapshot) const {
    const std::vector<int64_t> table = snapshot.table();
    const std::vector<write::RecordSource> sources = write::parse_write_table(table);
    ASSERT_EQ(sources.size(), bytes_.size() - snapshot.first());
    size_t at = 0;
    for (size_t index = 0; index < sources.size(); ++index) {
      const size_t row = snapshot.first() + index;
      EXPECT_FALSE(sources[index].strided);
      ASSERT_EQ(sources[index].bytes, bytes_[row].size());
      const std::string_view copied(reinterpret_cast<const char*>(sources[index].data), sources[index].bytes);
      EXPECT_TRUE(copied == bytes_[row]) << "row " << row;
      EXPECT_TRUE(sources[index].unchanging);
      EXPECT_EQ(table[at], dtypes_[row] | int64_t{io::kUnchanging});
      ASSERT_EQ(table[at + 2], std::ssize(sizes_[row]));
      EXPECT_TRUE(std::equal(sizes_[row].begin(), sizes_[row].end(), table.begin() + static_cast<int64_t>(at) + 3));
      at += 3 + 2 * sizes_[row].size();
    }
    EXPECT_EQ(at, table.size());
  }

 private:
  std::vector<int64_t> table_;
  std::vector<std::string> bytes_;
  std::vector<uint32_t> dtypes_;
  std::vector<Sizes> sizes_;
};

}  // namespace vescale_ckpt::stage
