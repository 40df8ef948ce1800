// Writing behind a trainer's back: slowly, at low priority, watched and cancelled from other threads.
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <functional>
#include <thread>

#include "base/error.h"
#include "data_files.h"
#include "error_of.h"

namespace vescale_ckpt::write {
namespace {

int priority() {
  return ::getpriority(PRIO_PROCESS, static_cast<id_t>(::syscall(SYS_gettid)));
}

TEST(Niceness, IsOfTheWorkersAlone) {
  const int before = priority();
  const auto caller = std::this_thread::get_id();
  for (const unsigned count : {0u, 1u, 3u}) {
    std::atomic<unsigned> workers{0};
    run_workers(
        count,
        [&](const std::atomic<bool>&) {
          ++workers;
          EXPECT_NE(std::this_thread::get_id(), caller);
          EXPECT_EQ(priority(), std::min(19, before + 3));
        },
        3);
    EXPECT_EQ(workers, std::max(1u, count));
    EXPECT_EQ(priority(), before);
  }
}

TEST(Niceness, EndsAtTheLowest) {
  const auto lowest = [](const std::atomic<bool>&) { EXPECT_EQ(priority(), 19); };
  const auto nested = [&](const std::atomic<bool>&) { run_workers(1, lowest, 19); };
  run_workers(1, nested, 19);
}

class Background : public AccessTest {
 protected:
  io::EngineOptions options() const { return small_options(GetParam()); }

  // A first transfer passes at once; the next would take years.
  io::EngineOptions crawling() const {
    io::EngineOptions crawling = options();
    crawling.bytes_per_second = 1;
    return crawling;
  }

  static const std::vector<Tensor>& tensors() {
    static const std::vector<Tensor> tensors = [] {
      std::vector<Tensor> tensors;
      for (uint64_t i = 0; i < 3; ++i) tensors.push_back(Tensor::of_bytes(2 * kSlotBytes + i, kTorchPlace, i));
      return tensors;
    }();
    return tensors;
  }
};

INSTANTIATE_TEST_SUITE_P(Each, Background, ::testing::Values(io::Access::direct, io::Access::buffered),
                         access_test_name);

void expect_cancelled(const std::function<void()>& call) {
  EXPECT_EQ(error_of(call).kind, Error::Kind::cancelled);
}

TEST_P(Background, IsCancelledWhileItWaitsForItsTurn) {
  {
    FileWriter writer(path("file"), 32 << 20, crawling(), true);
    std::jthread other([&] {
      while (writer.progress() == 0) std::this_thread::yield();
      writer.cancel();
    });
    expect_cancelled([&] { writer.write(sources_of(tensors())); });
    EXPECT_GT(writer.progress(), 0u);
    expect_cancelled([&] { writer.finish(false); });
  }
  EXPECT_TRUE(files().empty());
  expect_slots_back(options());
}

TEST_P(Background, IsLimitedOverAllCallsOfOneFile) {
  std::vector<Tensor> small;
  small.push_back(Tensor::of_bytes(1000));
  FileWriter writer(path("file"), 1 << 20, crawling(), true);
  writer.write(sources_of(small));
  std::jthread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // long enough for a write that does not wait
    writer.cancel();
  });
  expect_cancelled([&] { writer.write(sources_of(small)); });
}

// A worker that waits for its turn must not keep the others' error from the caller.
TEST_P(Background, AnErrorEndsTheWaitOfOthers) {
  const ArmedFault fault(Call::write, EIO);
  FileWriter writer(path("file"), 32 << 20, crawling(), true);
  EXPECT_EQ(error_of([&] { writer.write(sources_of(tensors())); }).code, EIO);
}

}  // namespace
}  // namespace vescale_ckpt::write
