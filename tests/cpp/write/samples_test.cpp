// Samples of tensors: equal for equal values however they lie, different if what is looked at changes.
#include "write/writer.h"

#include <gtest/gtest.h>

#include <complex>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "base/error.h"
#include "tensors.h"

namespace vescale_ckpt::write {
namespace {

template <typename Value>
int64_t address_of(const std::vector<Value>& values) {
  return address(std::as_bytes(std::span(values)).data());
}

TEST(Samples, AreOfValuesAndNotOfStrides) {
  std::vector<float> rows{1, 2, 3, 4, 5, 6}, columns{1, 4, 2, 5, 3, 6};
  const int64_t dtype = dtype_code("float32");
  const std::vector<int64_t> of_rows{dtype, address_of(rows), 2, 2, 3, 3, 1};
  const std::vector<int64_t> of_columns{dtype, address_of(columns), 2, 2, 3, 1, 2};
  const auto before = sample_hashes(of_rows, {}, 4);
  EXPECT_EQ(before, sample_hashes(of_columns, {}, 4));
  rows.front() = 7;
  EXPECT_NE(before, sample_hashes(of_rows, {}, 4));
}

TEST(Samples, AreOfTheFirstAndTheLastElement) {
  std::vector<int16_t> values(9);
  const std::vector<int64_t> table{dtype_code("int16"), address_of(values), 1, 9, 1};
  for (int16_t& value : {std::ref(values.front()), std::ref(values.back())}) {
    const auto before = sample_hashes(table, {}, 4);
    value = 1;
    EXPECT_NE(before, sample_hashes(table, {}, 4));
  }
}

TEST(Samples, SeeEachByteOfAnElement) {
  std::vector<std::complex<double>> values{{1, 2}};
  const std::vector<int64_t> table{dtype_code("complex128"), address_of(values), 0};
  const auto before = sample_hashes(table, {}, 4);
  values[0].imag(3);
  EXPECT_NE(before, sample_hashes(table, {}, 4));
}

TEST(Samples, ReadNothingOnDevicesAndOfEmptyTensors) {
  const int64_t dtype = dtype_code("int8");
  const std::vector<int64_t> table{dtype, 64, 1, 9, 1, dtype, 0, 2, 3, 0, 1, 1};
  const std::vector<int64_t> devices{0, -1};
  EXPECT_EQ(sample_hashes(table, devices, 4), (std::vector<uint64_t>{0, 0}));
  EXPECT_THROW(sample_hashes(table, std::span(devices).first(1), 4), Error);
}

}  // namespace
}  // namespace vescale_ckpt::write
