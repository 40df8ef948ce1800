// What both backends promise, checked on both.
#include "io/channel.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <set>
#include <thread>
#include <vector>

#include "error.h"
#include "io/memory.h"
#include "modes.h"
#include "tensors.h"

namespace vescale_ckpt::io {
namespace {

constexpr unsigned kDepth = 4;
constexpr uint64_t kPiece = 128 << 10;

class ChannelTest : public ModeTest {
 protected:
  void SetUp() override {
    ModeTest::SetUp();
    if (IsSkipped()) return;
    channel_ = make_channel(backend(), kDepth);
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

  // A transfer alone.
  void move(Transfer& transfer) {
    channel_->submit(&transfer);
    ASSERT_EQ(channel_->wait(), &transfer);
    EXPECT_GE(transfer.done, transfer.needed);
  }

  // The whole memory in pieces, as many in flight as the channel likes. Returns the number that came back.
  size_t move_all(Call call, File& file, const Memory& memory) {
    std::vector<Transfer> transfers;
    for (uint64_t at = 0; at < memory.size(); at += kPiece) {
      transfers.push_back(transfer(call, file, at, memory, at, std::min(kPiece, memory.size() - at)));
    }
    std::set<Transfer*> done;
    size_t sent = 0;
    while (done.size() < transfers.size()) {
      for (; sent < transfers.size() && sent - done.size() < channel_->depth(); ++sent) {
        transfers[sent].context = &transfers[sent];
        channel_->submit(&transfers[sent]);
      }
      Transfer* next = channel_->wait();
      EXPECT_EQ(next->context, next);
      EXPECT_EQ(next->done, next->size);
      if (!done.insert(next).second) {
        ADD_FAILURE() << "a transfer came back twice";
        break;
      }
    }
    return done.size();
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

  std::unique_ptr<Channel> channel_;
  std::unique_ptr<File> file_;
};

TEST_P(ChannelTest, WritesAndReadsBack) {
  const Memory memory = random_memory(9 * kPiece);
  EXPECT_EQ(move_all(Call::write, *file_, memory), 9u);
  EXPECT_EQ(read_file(path("file")), memory.text());
  const auto file = reopened();
  const Memory back(memory.size(), 0);
  EXPECT_EQ(move_all(Call::read, *file, back), 9u);
  EXPECT_EQ(back.text(), memory.text());
}

TEST_P(ChannelTest, HasADepth) {
  EXPECT_EQ(channel_->depth(), backend() == Backend::threads ? 1 : kDepth);
}

TEST_P(ChannelTest, ContinuesShortTransfers) {
  const Memory memory = random_memory(4 * kPiece);
  {
    const ArmedFault fault(Call::write, 0, 0, 1000);
    move_all(Call::write, *file_, memory);
    EXPECT_GT(system::calls_seen(Call::write), 8u);
  }
  EXPECT_EQ(read_file(path("file")), memory.text());
  const auto file = reopened();
  const Memory back(memory.size(), 0);
  const ArmedFault fault(Call::read, 0, 0, 1000);
  move_all(Call::read, *file, back);
  EXPECT_GT(system::calls_seen(Call::read), 8u);
  EXPECT_EQ(back.text(), memory.text());
}

TEST_P(ChannelTest, RepeatsInterruptedTransfers) {
  const Memory memory = random_memory(4 * kPiece);
  for (const int code : {EINTR, EAGAIN}) {
    {
      const ArmedFault fault(Call::write, code, 1, 5);
      move_all(Call::write, *file_, memory);
      EXPECT_GE(system::calls_seen(Call::write), 9u);
    }
    const auto file = reopened();
    const Memory back(memory.size(), 0);
    const ArmedFault fault(Call::read, code, 1, 5);
    move_all(Call::read, *file, back);
    EXPECT_GE(system::calls_seen(Call::read), 9u);
    EXPECT_EQ(back.text(), memory.text());
  }
}

TEST_P(ChannelTest, SaysWhatFailedAndWhere) {
  const Memory memory = random_memory(kPiece);
  struct Failure {
    Call call;
    int code;
    Error::Kind kind;
  };
  for (const auto& [call, code, kind] :
       {Failure{Call::write, EIO, Error::Kind::io}, Failure{Call::write, ENOSPC, Error::Kind::full},
        Failure{Call::write, EDQUOT, Error::Kind::full}, Failure{Call::read, EIO, Error::Kind::io}}) {
    Transfer write = transfer(Call::write, *file_, kBlock, memory, 0, kPiece);
    move(write);
    const auto file = reopened();
    Transfer failing = transfer(call, call == Call::read ? *file : *file_, kBlock, memory, 0, kPiece);
    const ArmedFault fault(call, code);
    channel_->submit(&failing);
    try {
      channel_->wait();
      FAIL() << std::strerror(code);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind, kind);
      EXPECT_EQ(error.code, code);
      EXPECT_EQ(error.path, path("file"));
      EXPECT_EQ(error.offset, kBlock);
      EXPECT_NE(std::string(error.what()).find(std::strerror(code)), std::string::npos) << error.what();
    }
  }
}

// Half is written, then the disk fails.
TEST_P(ChannelTest, SaysHowFarATransferCame) {
  const Memory memory = random_memory(kPiece);
  Transfer write = transfer(Call::write, *file_, 0, memory, 0, kPiece);
  write.done = kPiece / 2;
  const ArmedFault fault(Call::write, EIO);
  channel_->submit(&write);
  try {
    channel_->wait();
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.offset, kPiece / 2);
  }
}

// Descriptors that cannot do what is asked: the kernel's own errors, with nothing injected.
TEST_P(ChannelTest, PassesTheKernelsErrorsOn) {
  const Memory memory = random_memory(kPiece);
  Transfer write = transfer(Call::write, *file_, 0, memory, 0, kPiece);
  move(write);
  const auto readable = reopened();
  Transfer refused = transfer(Call::write, *readable, 0, memory, 0, kPiece);
  channel_->submit(&refused);
  try {
    channel_->wait();
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code, EBADF);
  }
}

TEST_P(ChannelTest, GoesTheNextWayWhenOneIsRefused) {
  const Memory memory = random_memory(3 * kPiece);
  const std::vector<Access> ways = {Access::direct, Access::uncached, Access::buffered};
  for (const int code : {EINVAL, EOPNOTSUPP}) {
    for (auto way = std::find(ways.begin(), ways.end(), access()); way + 1 != ways.end(); ++way) {
      const auto file = File::create(path(std::to_string(code) + access_name(*way)), *way);
      const ArmedFault fault(Call::write, code);
      Transfer write = transfer(Call::write, *file, 0, memory, 0, memory.size());
      move(write);
      EXPECT_EQ(file->access(), *(way + 1));
      EXPECT_EQ(write.access, *(way + 1));
      EXPECT_EQ(read_file(file->path()), memory.text());
    }
  }
}

TEST_P(ChannelTest, GivesUpWhenTheLastWayIsRefused) {
  const Memory memory = random_memory(kPiece);
  Transfer write = transfer(Call::write, *file_, 0, memory, 0, kPiece);
  const ArmedFault fault(Call::write, EINVAL, 0, 10);
  channel_->submit(&write);
  EXPECT_THROW(channel_->wait(), Error);
  EXPECT_EQ(file_->access(), Access::buffered);
}

// A read of whole blocks may pass the end of the file, if what is needed came.
TEST_P(ChannelTest, ReadsOverTheEndOfTheFile) {
  const Memory memory = random_memory(kPiece);
  Transfer write = transfer(Call::write, *file_, 0, memory, 0, kPiece);
  move(write);
  for (const uint64_t length : {kPiece - 1, kPiece - 700, kPiece - kBlock - 512}) {
    file_->truncate(length);
    const auto file = reopened();
    const Memory back(kPiece, 0);
    Transfer read = transfer(Call::read, *file, 0, back, 0, kPiece);
    read.needed = length;
    move(read);
    EXPECT_EQ(read.done, length);
    EXPECT_EQ(back.text().substr(0, length), memory.text().substr(0, length));

    Transfer too_much = transfer(Call::read, *file, 0, back, 0, kPiece);
    too_much.needed = length + 1;
    channel_->submit(&too_much);
    try {
      channel_->wait();
      FAIL() << length;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind, Error::Kind::corrupt);
      EXPECT_EQ(error.offset, length);
      EXPECT_EQ(error.path, path("file"));
    }
  }
}

// Shortened so that the rest starts off a block: it cannot go on directly.
TEST_P(ChannelTest, ContinuesOffABlock) {
  const Memory memory = random_memory(kBlock);
  {
    const ArmedFault fault(Call::write, 0);
    Transfer write = transfer(Call::write, *file_, 0, memory, 0, kBlock);
    move(write);
    EXPECT_EQ(write.access, access() == Access::direct ? Access::buffered : file_->access());
  }
  EXPECT_EQ(read_file(path("file")), memory.text());
  const auto file = reopened();
  const Memory back(kBlock, 0);
  const ArmedFault fault(Call::read, 0);
  Transfer read = transfer(Call::read, *file, 0, back, 0, kBlock);
  move(read);
  EXPECT_EQ(back.text(), memory.text());
}

// One fails while others are in flight: the channel's end waits for them, so that their memory may go.
TEST_P(ChannelTest, EndsWithTransfersInFlight) {
  Memory memory = random_memory(kDepth * kPiece);
  Transfer write = transfer(Call::write, *file_, 0, memory, 0, memory.size());
  move(write);
  const auto file = reopened();
  for (int round = 0; round < 20; ++round) {
    const ArmedFault fault(Call::read, EIO, round % 3);
    auto back = std::make_unique<Memory>(memory.size(), 0);
    std::vector<Transfer> reads(std::min(kDepth, channel_->depth()));
    for (size_t i = 0; i < reads.size(); ++i) {
      reads[i] = transfer(Call::read, *file, i * kPiece, *back, i * kPiece, kPiece);
      channel_->submit(&reads[i]);
    }
    try {
      for (size_t i = 0; i < reads.size(); ++i) channel_->wait();
    } catch (const Error& error) {
      EXPECT_EQ(error.code, EIO);
    }
    channel_.reset();
    back.reset();
    channel_ = make_channel(backend(), kDepth);
  }
}

// Nobody waits for any of them: still, when the channel is gone nothing is read into their memory any more.
TEST_P(ChannelTest, LeavesMemoryAloneWhenItIsGone) {
  constexpr uint64_t kLong = 2 << 20;  // takes the disk a few milliseconds
  const Memory memory = random_memory(kDepth * kLong);
  Transfer write = transfer(Call::write, *file_, 0, memory, 0, memory.size());
  move(write);
  const auto file = reopened();
  std::vector<Transfer> reads(std::min(kDepth, channel_->depth()));
  for (size_t i = 0; i < reads.size(); ++i) {
    reads[i] = transfer(Call::read, *file, i * kLong, memory, i * kLong, kLong);
    channel_->submit(&reads[i]);
  }
  channel_.reset();
  std::memset(memory.data(), 0x11, memory.size());
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  EXPECT_EQ(memory.text().find_first_not_of('\x11'), std::string_view::npos);
}

INSTANTIATE_TEST_SUITE_P(Each, ChannelTest, ::testing::ValuesIn(all_modes()), mode_name);

TEST(Backends, HaveNames) {
  EXPECT_EQ(backend_named("auto"), Backend::automatic);
  EXPECT_EQ(backend_named("threads"), Backend::threads);
  EXPECT_EQ(backend_named("uring"), Backend::uring);
  EXPECT_THROW(backend_named("aio"), Error);
}

TEST(Backends, AreBothTested) {
  if (const std::string reason = why_no_uring(); !reason.empty()) GTEST_SKIP() << "io_uring is not: " << reason;
}

TEST(Backends, SayWhyTheyAreNotToBeHad) {
  std::string reason = "Invalid argument";
  const bool available = uring_available(&reason);
  EXPECT_NO_THROW(make_channel(available ? Backend::uring : Backend::threads, kDepth));
  try {
    make_channel(Backend::uring, available ? 1 << 20 : kDepth);  // deeper than any ring
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(reason), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace vescale_ckpt::io
