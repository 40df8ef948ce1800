#include "io/shared_counter.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

namespace vescale_ckpt::io {
namespace {

class SharedCounterTest : public ::testing::Test {
 protected:
  static constexpr size_t kBytes = 4096;

  SharedCounterTest()
      : memory_(
            static_cast<std::byte*>(::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)),
            kBytes) {}
  ~SharedCounterTest() override { ::munmap(memory_.data(), kBytes); }

  const std::span<std::byte> memory_;
};

TEST_F(SharedCounterTest, AnotherProcessIsSeen) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::usleep(20'000);
    memory_[100] = std::byte{7};
    SharedCounter(memory_, 64).set(3);
    ::_exit(0);
  }
  const SharedCounter counter(memory_, 64);
  EXPECT_EQ(counter.wait(3, 30), 3u);
  EXPECT_EQ(memory_[100], std::byte{7});
  EXPECT_EQ(::waitpid(child, nullptr, 0), child);
}

TEST_F(SharedCounterTest, TheWaitEnds) {
  SharedCounter counter(memory_, 0);
  EXPECT_THROW(SharedCounter(memory_, 2), Error);
  EXPECT_THROW(SharedCounter(memory_, kBytes), Error);
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
