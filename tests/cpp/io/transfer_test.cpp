#include "io/transfer.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>

#include "base/error.h"
#include "base/memory.h"
#include "data_files.h"
#include "error_of.h"
#include "tensors.h"

namespace vescale_ckpt::io {
namespace {

using namespace std::chrono_literals;

constexpr uint64_t kPiece = 128 << 10;

class TransferTest : public AccessTest {
 protected:
  void SetUp() override {
    AccessTest::SetUp();
    if (IsSkipped()) return;
    file_ = File::create(path("file"), access());
  }

  Transfer transfer(Call call, File& file, uint64_t offset, const Memory& memory, uint64_t at, uint64_t size) {
    Transfer transfer;
    transfer.call = call;
    transfer.file = &file;
    transfer.offset = offset;
    transfer.data = memory.data() + at;
    transfer.size = transfer.needed = size;
    return transfer;
  }

  // The whole memory in pieces.
  void perform_all(Call call, File& file, const Memory& memory) {
    for (uint64_t at = 0; at < memory.size(); at += kPiece) {
      Transfer piece = transfer(call, file, at, memory, at, std::min(kPiece, memory.size() - at));
      perform(piece);
      EXPECT_EQ(piece.done, piece.size);
    }
  }

  // The file as it is on disk, not in the page cache unless buffered is asked for.
  std::unique_ptr<File> reopened() {
    file_->sync();
    if (access() != Access::buffered) {
      EXPECT_EQ(::posix_fadvise(file_->descriptor(Access::buffered), 0, 0, POSIX_FADV_DONTNEED), 0);
    }
    return File::open(path("file"), access());
  }

  Memory random_memory(uint64_t bytes) const {
    Memory memory(bytes, 0);
    fill_random(memory.bytes(), 1);
    return memory;
  }

  std::unique_ptr<File> file_;
};

TEST_P(TransferTest, WritesAndReadsBack) {
  const Memory memory = random_memory(9 * kPiece);
  perform_all(Call::write, *file_, memory);
  EXPECT_EQ(read_file(path("file")), memory.text());
  const auto file = reopened();
  const Memory back(memory.size(), 0);
  perform_all(Call::read, *file, back);
  EXPECT_EQ(back.text(), memory.text());
}

// Half is written, then the disk fails.
TEST_P(TransferTest, SaysHowFarATransferCame) {
  const Memory memory = random_memory(kPiece);
  Transfer write = transfer(Call::write, *file_, 0, memory, 0, kPiece);
  write.done = kPiece / 2;
  const ArmedFault fault(Call::write, EIO);
  EXPECT_EQ(error_of([&] { perform(write); }).offset, kPiece / 2);
}

// A read of whole blocks may pass the end of the file, if what is needed came.
TEST_P(TransferTest, ReadsOverTheEndOfTheFile) {
  const Memory memory = random_memory(kPiece);
  Transfer write = transfer(Call::write, *file_, 0, memory, 0, kPiece);
  perform(write);
  for (const uint64_t length : {kPiece - 1, kPiece - 700, kPiece - kBlock - 512}) {
    file_->truncate(length);
    const auto file = reopened();
    const Memory back(kPiece, 0);
    Transfer read = transfer(Call::read, *file, 0, back, 0, kPiece);
    read.needed = length;
    perform(read);
    EXPECT_EQ(read.done, length);
    EXPECT_EQ(back.text().substr(0, length), memory.text().substr(0, length));

    Transfer too_much = transfer(Call::read, *file, 0, back, 0, kPiece);
    too_much.needed = length + 1;
    const Error error = error_of([&] { perform(too_much); });
    EXPECT_EQ(error.kind, Error::Kind::corrupt);
    EXPECT_EQ(error.offset, length);
    EXPECT_EQ(error.path, path("file"));
  }
}

// Shortened so that the rest starts off a block: it cannot go on directly.
TEST_P(TransferTest, ContinuesOffABlock) {
  const Memory memory = random_memory(kBlock);
  {
    const ArmedFault fault(Call::write, 0);
    Transfer write = transfer(Call::write, *file_, 0, memory, 0, kBlock);
    perform(write);
    EXPECT_EQ(write.access, access() == Access::direct ? Access::buffered : file_->access());
  }
  EXPECT_EQ(read_file(path("file")), memory.text());
  const auto file = reopened();
  const Memory back(kBlock, 0);
  const ArmedFault fault(Call::read, 0);
  Transfer read = transfer(Call::read, *file, 0, back, 0, kBlock);
  perform(read);
  EXPECT_EQ(back.text(), memory.text());
}

INSTANTIATE_TEST_SUITE_P(Each, TransferTest, ::testing::Values(Access::direct, Access::buffered), access_test_name);

using Time = RateLimit::Time;

class RateLimitTest : public ::testing::Test {
 protected:
  RateLimit limit(uint64_t bytes_per_second) {
    return RateLimit(bytes_per_second, [this] { return now_; });
  }
  Time now_ = 5s;
};

TEST_F(RateLimitTest, IsOffAtZero) {
  RateLimit none = limit(0);
  for (int i = 0; i < 10; ++i) EXPECT_EQ(none.take(uint64_t{1} << 60), 0s);
}

// A caller that waits for every delay it gets never exceeds the rate, except in its first transfer and one burst.
TEST_F(RateLimitTest, HoldsInTheLongRun) {
  constexpr uint64_t kRate = 3'000'000, kPiece = 8 << 20;
  RateLimit three = limit(kRate);
  const Time start = now_;
  uint64_t moved = 0;
  for (int i = 0; i < 1000; ++i) {
    now_ += three.take(kPiece);
    moved += kPiece;
  }
  const double seconds = std::chrono::duration<double>(now_ - start + RateLimit::kBurst).count();
  EXPECT_NEAR(static_cast<double>(moved - kPiece) / seconds, kRate, 1);
}

TEST_F(RateLimitTest, CatchesUpWithABurstAndNoMore) {
  RateLimit thousand = limit(1000);
  EXPECT_EQ(thousand.take(100), 0s);
  now_ += 1h;
  uint64_t at_once = 0;
  while (thousand.take(10) == 0s) at_once += 10;
  EXPECT_EQ(at_once, 110u);  // a tenth of a second's, and the one that goes into debt
}

TEST_F(RateLimitTest, NeverOverflows) {
  RateLimit one = limit(1);
  EXPECT_EQ(one.take(~uint64_t{0}), 0s);
  EXPECT_GT(one.take(~uint64_t{0}), 24h);
  EXPECT_GT(one.take(1), 24h);
}

}  // namespace
}  // namespace vescale_ckpt::io
