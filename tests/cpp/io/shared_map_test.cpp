// Memory that two maps of one file share.
#include "io/shared_map.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/error.h"
#include "base/system.h"

namespace vescale_ckpt::io {
namespace {

class SharedMaps : public testing::Test {
 protected:
  void SetUp() override {
    file_ = ::memfd_create("test", 0);
    ASSERT_GE(file_, 0);
    ASSERT_EQ(::ftruncate(file_, kBytes), 0);
  }
  void TearDown() override {
    system::clear_faults();
    if (file_ >= 0) ::close(file_);
  }
  static constexpr uint64_t kBytes = 3 * 4096;
  int file_ = -1;
};

TEST_F(SharedMaps, WhatOneWritesTheOtherReads) {
  SharedMap one(file_, kBytes), other(file_, kBytes);
  ::close(file_);
  file_ = -1;
  ASSERT_EQ(one.bytes().size(), kBytes);
  one.bytes()[5000] = std::byte{7};
  EXPECT_EQ(other.bytes()[5000], std::byte{7});
  EXPECT_EQ(other.bytes()[0], std::byte{0});
}

TEST_F(SharedMaps, ARefusalIsAnError) {
  system::inject_fault(Call::map, ENOMEM, 0, 1);
  EXPECT_THROW(SharedMap(file_, kBytes), Error);
}

}  // namespace
}  // namespace vescale_ckpt::io
