// Records that are checked where they lie: all damage is told, and nothing is delivered.
#include <cerrno>
#include <cstring>
#include <set>

#include "base/error.h"
#include "data_files.h"
#include "read/archive_file.h"

namespace vescale_ckpt::read {
namespace {

class Check : public AccessTest {
 protected:
  void SetUp() override {
    AccessTest::SetUp();
    for (const uint64_t bytes : {uint64_t{0}, uint64_t{64}, kBlock, kSlotBytes + 5001, uint64_t{7}, kBlock}) {
      tensors_.push_back(Tensor::of_bytes(bytes, kTorchPlace, 1 + tensors_.size()));
    }
    file_ = write_data_file(path("file"), sources_of(tensors_), options());
    content_ = read_file(file_.path);
    drop_cache(file_.path);
  }

  io::EngineOptions options() const { return small_options(GetParam()); }

  std::unique_ptr<ReadReport> check(const std::string& other = {}) const {
    std::vector<ReadItem> items;
    for (size_t i = 0; i < tensors_.size(); ++i) items.push_back(tensors_[i].item(0, file_.records[i], nullptr));
    return check_tensors(std::vector{other.empty() ? file_.path : other}, items, options());
  }

  void flip_in_body(size_t record) const {
    const uint64_t at = file_.records[record].offset + tensors_[record].source().framing->prologue().size();
    const char flipped = static_cast<char>(content_[at] ^ 1);
    std::fstream(file_.path, std::ios::in | std::ios::out | std::ios::binary)
        .seekp(static_cast<std::streamoff>(at))
        .write(&flipped, 1);
  }

  static std::set<uint32_t> rows(const ReadReport& report) {
    std::set<uint32_t> rows;
    for (const DamagedItem& damaged : report.damaged) rows.insert(damaged.item);
    EXPECT_EQ(rows.size(), report.damaged.size());
    return rows;
  }

  std::vector<Tensor> tensors_;
  WrittenFile file_;
  std::string content_;
};

INSTANTIATE_TEST_SUITE_P(Each, Check, ::testing::Values(io::Access::direct, io::Access::buffered), access_test_name);

TEST_P(Check, SoundRecordsAreSound) {
  const auto report = check();
  EXPECT_TRUE(report->damaged.empty());
  EXPECT_TRUE(report->unread.empty());
  EXPECT_EQ(report->unverified_bytes, 0u);
  EXPECT_EQ(report->stats.in_place.load(), 0u);
  expect_slots_back(options());
}

TEST_P(Check, EveryDamageIsTold) {
  for (const size_t record : {1, 3, 4}) flip_in_body(record);
  const auto report = check();
  EXPECT_EQ(rows(*report), (std::set<uint32_t>{1, 3, 4}));
  for (const DamagedItem& damaged : report->damaged) {
    EXPECT_GE(damaged.offset, file_.records[damaged.item].offset);
    EXPECT_LT(damaged.offset, file_.records[damaged.item].offset + file_.records[damaged.item].length);
    EXPECT_NE(damaged.reason.find("checksum mismatch"), std::string::npos);
  }
  expect_slots_back(options());
}

TEST_P(Check, ATruncatedFileDamagesWhatItLost) {
  ASSERT_EQ(::truncate(file_.path.c_str(), static_cast<off_t>(file_.records[4].offset + 1)), 0);
  EXPECT_EQ(rows(*check()), (std::set<uint32_t>{4, 5}));
}

TEST_P(Check, AMissingFileDamagesAll) {
  EXPECT_EQ(rows(*check(path("no such file"))).size(), tensors_.size());
}

TEST_P(Check, AnErrorOfTheDiskIsOfTheRecordsThatItHits) {
  system::inject_fault(Call::read, EIO, 0, uint64_t{1} << 40);
  EXPECT_EQ(rows(*check()).size(), tensors_.size());
  system::clear_faults();
  EXPECT_TRUE(check()->damaged.empty());
  // Each failure in turn, of a moment: at most the record that was read alone.
  for (uint64_t skip = 0; skip < 8; ++skip) {
    system::inject_fault(Call::read, EIO, skip, 1);
    EXPECT_LE(rows(*check()).size(), 1u);
    system::clear_faults();
  }
  expect_slots_back(options());
}

class ArchiveFile : public ScratchTest {
 protected:
  void write(std::string_view archive) {
    std::ofstream(path("file"), std::ios::binary) << std::string(kBefore, 'x') << archive << "behind";
  }
  void put(uint64_t at, char byte) {
    std::fstream(path("file"), std::ios::in | std::ios::out | std::ios::binary)
        .seekp(static_cast<std::streamoff>(kBefore + at))
        .write(&byte, 1);
  }
  ArchiveCheck check(std::string_view archive, int64_t crc = -1) {
    const auto file = io::File::open(path("file"), io::Access::buffered);
    return check_archive_in(*file, kBefore, archive.size(), crc);
  }
  static constexpr uint64_t kBefore = 100;
};

TEST_F(ArchiveFile, AgreesWithTheCheckInMemory) {
  const std::string sound = format::object_record(std::string("\x80\x02K\x05.", 5));
  const auto crc = int64_t{crc32(0, sound.data(), sound.size())};
  write(sound);
  EXPECT_EQ(check(sound, crc).wrong, "");
  EXPECT_EQ(check(sound, crc ^ 1).wrong, "it is not the object that was saved");
  for (size_t bit = 0; bit < 8 * sound.size(); bit += 3) {
    std::string damaged = sound;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << (bit % 8)));
    put(bit / 8, damaged[bit / 8]);
    const ArchiveCheck found = check(damaged);
    EXPECT_EQ(found.wrong, format::check_archive({reinterpret_cast<const std::byte*>(damaged.data()), damaged.size()}))
        << bit;
    EXPECT_NE(check(damaged, crc).wrong, "") << bit;
    EXPECT_GE(found.offset, kBefore);
    EXPECT_LT(found.offset, kBefore + sound.size());
    put(bit / 8, sound[bit / 8]);
  }
}

TEST_F(ArchiveFile, ShortFilesAndFailingDisksAreTold) {
  const std::string sound = format::object_record(std::string("\x80\x02K\x05.", 5));
  write(sound);
  std::filesystem::resize_file(path("file"), kBefore + sound.size() - 1);
  EXPECT_NE(check(sound).wrong.find("truncated"), std::string::npos);
  write(sound);
  system::inject_fault(Call::read, EIO, 1, 1);
  EXPECT_NE(check(sound).wrong.find("Input/output error"), std::string::npos);
  system::clear_faults();
  EXPECT_EQ(check(sound).wrong, "");
}

}  // namespace
}  // namespace vescale_ckpt::read
