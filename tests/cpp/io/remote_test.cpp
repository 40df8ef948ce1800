#include "io/remote.h"

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "error_of.h"
#include "io/file.h"
#include "io/transfer.h"
#include "tensors.h"

namespace vescale_ckpt::io {
namespace {

constexpr uint64_t kPart = 8 << 20;
constexpr char kPath[] = "fake://bucket/file";

// A store in memory, which takes parts as an object store does: in order, and the object appears at the end.
class FakeStore {
 public:
  FakeStore() {
    RemoteStore store;
    store.open = [this](const std::string& path) -> std::unique_ptr<RemoteObject> {
      const std::lock_guard lock(mutex_);
      const auto found = objects_.find(path);
      if (found == objects_.end()) throw Error(Error::Kind::io, "open " + path + ": no such object", path, 0, ENOENT);
      return std::make_unique<Object>(found->second);
    };
    store.upload = [this](std::shared_ptr<PartWindow> window) {
      senders_.emplace_back([this, window = std::move(window)] { send(*window); });
    };
    set_remote_store(std::move(store));
  }
  ~FakeStore() {
    senders_.clear();
    set_remote_store({});
  }

  bool has(const std::string& path) {
    const std::lock_guard lock(mutex_);
    return objects_.contains(path);
  }
  std::vector<std::byte> content(const std::string& path) {
    const std::lock_guard lock(mutex_);
    return objects_.at(path);
  }

  std::vector<uint64_t> part_bytes;  // of the last file
  int aborted = 0;
  int fails_at = -1;  // the part whose upload fails

 private:
  class Object : public RemoteObject {
   public:
    explicit Object(std::vector<std::byte> bytes)
        : bytes_(std::make_shared<const std::vector<std::byte>>(std::move(bytes))) {}
    uint64_t size() const override { return bytes_->size(); }
    std::shared_ptr<const std::byte> fetch(uint64_t offset, uint64_t) override {
      return {bytes_, bytes_->data() + offset};
    }

   private:
    const std::shared_ptr<const std::vector<std::byte>> bytes_;
  };

  void send(PartWindow& window) {
    std::vector<std::byte> all;
    part_bytes.clear();
    try {
      while (const auto part = window.next()) {
        if (static_cast<int>(part_bytes.size()) == fails_at) {
          throw Error(Error::Kind::io, "the store is down", window.path(), 0, EIO);
        }
        part_bytes.push_back(part->bytes().size());
        all.insert(all.end(), part->bytes().begin(), part->bytes().end());
      }
      const std::lock_guard lock(mutex_);
      objects_[window.path()] = std::move(all);
    } catch (const Error& error) {
      ++aborted;
      window.fail(error);
      return;
    }
    window.uploaded();
  }

  std::mutex mutex_;
  std::map<std::string, std::vector<std::byte>> objects_;
  std::vector<std::jthread> senders_;
};

class RemoteTest : public testing::Test {
 protected:
  std::unique_ptr<File> created() {
    auto file = File::create(kPath, Access::direct);
    file->begin(1, kPart);
    return file;
  }
  static std::vector<std::byte> random_bytes(uint64_t bytes) {
    std::vector<std::byte> made(bytes);
    fill_random(made, 1);
    return made;
  }

  FakeStore store_;
};

TEST_F(RemoteTest, PartsAreMultiplesAndFewEnough) {
  EXPECT_EQ(part_bytes_for(1, 4 << 20), uint64_t{8 << 20});
  EXPECT_EQ(part_bytes_for(1, 8 << 20), uint64_t{8 << 20});
  for (const uint64_t bytes : {uint64_t{1} << 36, uint64_t{5} << 40}) {
    EXPECT_EQ(part_bytes_for(bytes, kPart) % kPart, 0u);
    EXPECT_LE(bytes / part_bytes_for(bytes, kPart), 10'000u);
  }
  constexpr uint64_t kUnit = 8 << 20, kMost = 64 << 20;
  EXPECT_EQ(part_bytes_for(1, kUnit, kMost), kUnit);
  EXPECT_EQ(part_bytes_for(3 * kUnit, kUnit, kMost), 3 * kUnit);  // one request
  EXPECT_EQ(part_bytes_for(uint64_t{1} << 30, kUnit, kMost), kMost);
  EXPECT_EQ(part_bytes_for(uint64_t{1} << 30, kUnit, kMost - 1), kMost);
  EXPECT_EQ(part_bytes_for(uint64_t{1} << 40, kUnit, kMost), uint64_t{136} << 20);
}

TEST_F(RemoteTest, WhatWasWrittenInAnyOrderIsReadBack) {
  const auto bytes = random_bytes(5 * kPart + 12345);
  const auto file = created();
  // Neighbours change places; pieces straddle parts.
  constexpr uint64_t kPiece = kPart / 2 + 4096;
  for (uint64_t at = 0; at < bytes.size(); at += 2 * kPiece) {
    for (const uint64_t begin : {at + kPiece, at}) {
      if (begin >= bytes.size()) continue;
      const auto piece = std::span(bytes).subspan(begin, std::min(kPiece, bytes.size() - begin));
      write_exactly(*file, begin, piece);
    }
  }
  file->complete(bytes.size(), true);
  EXPECT_EQ(store_.content(kPath), bytes);
  EXPECT_EQ(store_.part_bytes, (std::vector<uint64_t>{kPart, kPart, kPart, kPart, kPart, 12345}));

  const auto opened = File::open(kPath, Access::direct);
  EXPECT_EQ(opened->size(), bytes.size());
  EXPECT_EQ(opened->access(), Access::buffered);
  std::vector<std::byte> read(1000);
  read_exactly(*opened, kPart - 500, read);
  EXPECT_TRUE(std::ranges::equal(read, std::span(bytes).subspan(kPart - 500, 1000)));
}

TEST_F(RemoteTest, ReadsAcrossTheEndGiveWhatThereIs) {
  const auto file = created();
  write_exactly(*file, 0, random_bytes(4096));
  file->complete(4000, true);
  const auto opened = File::open(kPath, Access::buffered);
  std::vector<std::byte> target(4096);
  Transfer transfer;  // a read
  transfer.file = opened.get();
  transfer.data = target.data();
  transfer.size = 4096;
  transfer.needed = 4000;
  perform(transfer);
  EXPECT_EQ(transfer.done, 4000u);
  EXPECT_FALSE(transfer.lent);
  Transfer lends;
  lends.file = opened.get();
  lends.offset = 100;
  lends.size = 3996;
  lends.needed = 3900;
  perform(lends);
  EXPECT_EQ(lends.done, 3900u);
  EXPECT_EQ(lends.data, lends.lent.get());
  EXPECT_TRUE(std::ranges::equal(std::span(lends.data, 3900), std::span(target).subspan(100, 3900)));
  transfer.needed = 4001;
  EXPECT_THROW(perform(transfer), Error);
}

TEST_F(RemoteTest, WritersWaitForTheLowestBytes) {
  const auto file = created();
  const auto bytes = random_bytes(kPart);
  auto ahead = std::async(std::launch::async, [&] {
    for (uint64_t part = 1; part < 12; ++part) write_exactly(*file, part * kPart, bytes);
  });
  EXPECT_EQ(ahead.wait_for(std::chrono::milliseconds(300)), std::future_status::timeout);
  write_exactly(*file, 0, bytes);
  ahead.get();
  file->complete(12 * kPart, true);
  EXPECT_EQ(store_.content(kPath).size(), 12 * kPart);
}

TEST_F(RemoteTest, AnUploadThatFailsEndsAllWaits) {
  store_.fails_at = 1;
  const auto file = created();
  const auto bytes = random_bytes(kPart);
  const Error error = error_of([&] {
    for (uint64_t part = 0; part < 20; ++part) write_exactly(*file, part * kPart, bytes);
    file->complete(20 * kPart, true);
  });
  EXPECT_STREQ(error.what(), "the store is down");
  file->discard();
  EXPECT_FALSE(store_.has(kPath));
}

}  // namespace
}  // namespace vescale_ckpt::io
