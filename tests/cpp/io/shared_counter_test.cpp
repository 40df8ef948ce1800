#include "io/shared_map.h"

#include <sys/wait.h>
#include <unistd.h>

namespace vescale_ckpt::io {
namespace {

class SharedCounterTest : public ::testing::Test {
 protected:
  SharedCounterTest() : file_(std::tmpfile()) { EXPECT_EQ(::ftruncate(::fileno(file_), 4096), 0); }
  ~SharedCounterTest() override { std::fclose(file_); }

  std::FILE* file_;
};

TEST_F(SharedCounterTest, AnotherProcessIsSeen) {
  const pid_t child = ::fork();
  if (child == 0) {  // maps the file for itself, elsewhere
    const SharedMap map(::fileno(file_), 4096);
    ::usleep(20'000);
    map.bytes()[100] = std::byte{7};
    SharedCounter(map, 64).set(3);
    ::_exit(0);
  }
  const SharedMap map(::fileno(file_), 4096);
  const SharedCounter counter(map, 64);
  EXPECT_EQ(counter.wait(3, 30), 3u);
  EXPECT_EQ(map.bytes()[100], std::byte{7});
  EXPECT_EQ(::waitpid(child, nullptr, 0), child);
}

TEST_F(SharedCounterTest, TheWaitEnds) {
  const SharedMap map(::fileno(file_), 4096);
  SharedCounter counter(map, 0);
  EXPECT_THROW(SharedCounter(map, 2), Error);
  EXPECT_THROW(SharedCounter(map, 4096), Error);
  counter.set(2);
  EXPECT_EQ(counter.wait(1, 30), 2u);  // is further already
  EXPECT_EQ(counter.wait(3, 0.01), 2u);
  EXPECT_EQ(counter.wait(3, 0), 2u);
  std::thread other([&] {
    for (uint32_t i = 3; i <= 100; ++i) counter.set(i);
  });
  EXPECT_GE(counter.wait(100, 30), 100u);
  other.join();
}

}  // namespace
}  // namespace vescale_ckpt::io
