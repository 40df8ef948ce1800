// Tests of AccessTest run with each way that bytes may take to a file.
#pragma once

#include <string>
#include <vector>

#include "io/file.h"
#include "scratch.h"

namespace vescale_ckpt {

inline std::vector<io::Access> every_access() {
#if defined(__SANITIZE_THREAD__)
  return {io::Access::direct, io::Access::buffered};  // threads do the same with uncached files
#else
  return {io::Access::direct, io::Access::uncached, io::Access::buffered};
#endif
}

inline std::string access_test_name(const ::testing::TestParamInfo<io::Access>& info) {
  return io::access_name(info.param);
}

class AccessTest : public ScratchTest, public ::testing::WithParamInterface<io::Access> {
 protected:
  io::Access access() const { return GetParam(); }

  void SetUp() override {
    ScratchTest::SetUp();
    if (access() != io::Access::direct) return;
    const bool has_direct = io::File::create(path("probe"), access())->access() == io::Access::direct;
    std::filesystem::remove(path("probe"));
    if (!has_direct) GTEST_SKIP() << "no direct I/O in " << directory();
  }
};

}  // namespace vescale_ckpt
