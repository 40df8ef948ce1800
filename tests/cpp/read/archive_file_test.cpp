// Archives that are checked where they lie: as the check in memory tells, and where a disk fails.
#include <cerrno>

#include "base/error.h"
#include "data_files.h"
#include "read/archive_file.h"

namespace vescale_ckpt::read {
namespace {

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
  EXPECT_THROW(check(sound), Error);
  system::clear_faults();
  EXPECT_EQ(check(sound).wrong, "");
}

}  // namespace
}  // namespace vescale_ckpt::read
