#include "base/system.h"

#include <fcntl.h>

#include <cerrno>
#include <vector>

#include "scratch.h"

namespace vescale_ckpt {
namespace {

class System : public ScratchTest {};

TEST_F(System, ReturnsErrnoAsNegativeResults) {
  EXPECT_EQ(system::open(path("missing").c_str(), O_RDONLY, 0), -ENOENT);
  EXPECT_EQ(system::unlink(path("missing").c_str()), -ENOENT);
  EXPECT_EQ(system::rename(path("missing").c_str(), path("other").c_str()), -ENOENT);
  EXPECT_EQ(system::sync_directory(path("missing").c_str()), -ENOENT);
  EXPECT_EQ(system::sync(-1), -EBADF);
  EXPECT_EQ(system::truncate(-1, 0), -EBADF);
  EXPECT_EQ(system::file_size(-1), -EBADF);
  char byte = 0;
  EXPECT_EQ(system::read(-1, &byte, 1, 0, 0), -EBADF);
  EXPECT_EQ(system::write(-1, &byte, 1, 0, 0), -EBADF);
  std::optional<uint64_t> bytes;
  EXPECT_EQ(system::free_bytes(path("missing").c_str(), bytes), -ENOENT);
}

TEST_F(System, TellsFreeSpace) {
  std::optional<uint64_t> bytes;
  ASSERT_EQ(system::free_bytes(directory().c_str(), bytes), 0);
  ASSERT_TRUE(bytes);
  EXPECT_GT(*bytes, 0u);
  ASSERT_EQ(system::free_bytes("/proc", bytes), 0);
  EXPECT_FALSE(bytes) << "it has no blocks at all, which does not mean that it is full";
}

TEST_F(System, KnowsWhatIsInThePageCache) {
  constexpr uint64_t kBytes = 1 << 20;
  write_file(path("file"), std::string(kBytes, 'x'));
  const int fd = system::open(path("file").c_str(), O_RDONLY, 0);
  ASSERT_GE(fd, 0);
  EXPECT_EQ(system::file_size(fd), static_cast<int64_t>(kBytes));
  EXPECT_EQ(system::resident_bytes(fd, kBytes), kBytes);  // just written
  EXPECT_EQ(system::sync(fd), 0);
  ASSERT_EQ(::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED), 0);
  EXPECT_LT(system::resident_bytes(fd, kBytes), kBytes / 8);
  system::close(fd);
}

TEST_F(System, FaultsWaitThenStrikeThenStop) {
  const auto open_missing = [&] { return system::open(path("missing").c_str(), O_RDONLY, 0); };
  system::inject_fault(Call::open, EIO, 2, 3);
  EXPECT_EQ(open_missing(), -ENOENT);
  EXPECT_EQ(open_missing(), -ENOENT);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(open_missing(), -EIO);
  EXPECT_EQ(open_missing(), -ENOENT);
  EXPECT_EQ(system::calls_seen(Call::open), 6u);
  EXPECT_EQ(system::calls_seen(Call::sync), 0u);
  system::clear_faults();
  EXPECT_EQ(system::calls_seen(Call::open), 0u);
  EXPECT_EQ(open_missing(), -ENOENT);
}

TEST_F(System, ShortTransfersKeepSomeProgress) {
  std::string bytes(1 << 20, 'x');
  write_file(path("file"), bytes);
  const int fd = system::open(path("file").c_str(), O_RDWR, 0);
  const auto read = [&](uint64_t size) { return system::read(fd, bytes.data(), size, 0, 0); };
  system::inject_fault(Call::read, 0, 0, 100);
  EXPECT_EQ(read(1 << 20), 1 << 19);
  EXPECT_EQ(read(3 * 4096), 4096);
  EXPECT_EQ(read(4096), 4095);
  EXPECT_EQ(read(2), 1);
  EXPECT_EQ(read(1), 1);
  EXPECT_EQ(read(0), 0);
  EXPECT_EQ(system::read(-1, bytes.data(), 1, 0, 0), -EBADF);
  EXPECT_EQ(system::write(fd, bytes.data(), 4096, 0, 0), 4096);  // not armed
  system::close(fd);
}

TEST_F(System, NamesItsCalls) {
  EXPECT_EQ(system::call_named("open"), Call::open);
  EXPECT_EQ(system::call_named("sync_directory"), Call::sync_directory);
  EXPECT_EQ(system::call_named("space"), Call::space);
  EXPECT_FALSE(system::call_named("fork"));
}

}  // namespace
}  // namespace vescale_ckpt
