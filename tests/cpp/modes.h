// The ways that bytes may take: each backend with each access. Tests of ModeTest run on all of them.
#pragma once

#include <initializer_list>
#include <ostream>
#include <string>
#include <vector>

#include "io/channel.h"
#include "scratch.h"

namespace vescale_ckpt {

struct Mode {
  io::Backend backend;
  io::Access access;

  std::string name() const {
    return std::string(backend == io::Backend::uring ? "uring_" : "threads_") + io::access_name(access);
  }
  friend std::ostream& operator<<(std::ostream& out, const Mode& mode) { return out << mode.name(); }
};

// Why io_uring is not tested here; empty if it is.
inline std::string why_no_uring() {
#if defined(__SANITIZE_THREAD__)
  // Rings are mapped by bare system calls, so that it does not notice when one takes the place of another.
  return "ThreadSanitizer takes the memory of a new ring for that of an old one";
#else
  std::string reason;
  return io::uring_available(&reason) ? "" : reason;
#endif
}

inline std::vector<Mode> modes(std::initializer_list<io::Access> accesses) {
  std::vector<Mode> modes;
  for (const io::Backend backend : {io::Backend::threads, io::Backend::uring}) {
    if (backend == io::Backend::uring && !why_no_uring().empty()) continue;
    for (const io::Access access : accesses) modes.push_back({backend, access});
  }
  return modes;
}

inline std::vector<Mode> all_modes() {
#if defined(__SANITIZE_THREAD__)
  return modes({io::Access::direct, io::Access::buffered});  // threads do the same with uncached files
#else
  return modes({io::Access::direct, io::Access::uncached, io::Access::buffered});
#endif
}

inline std::string mode_name(const ::testing::TestParamInfo<Mode>& info) {
  return info.param.name();
}

class ModeTest : public ScratchTest, public ::testing::WithParamInterface<Mode> {
 protected:
  io::Backend backend() const { return GetParam().backend; }
  io::Access access() const { return GetParam().access; }

  void SetUp() override {
    ScratchTest::SetUp();
    if (access() != io::Access::direct) return;
    const bool has_direct = io::File::create(path("probe"), access())->access() == io::Access::direct;
    std::filesystem::remove(path("probe"));
    if (!has_direct) GTEST_SKIP() << "no direct I/O in " << directory();
  }
};

}  // namespace vescale_ckpt
