#include "format/archive.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "format/golden.h"

namespace vescale_ckpt::format {
namespace {

std::string_view text(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

constexpr std::string_view kPickle = "\x80\x02K\x07.";  // of 7

std::string small_archive() {
  ArchiveWriter archive;
  archive.add("data.pkl", kPickle);
  archive.add("empty", "");
  archive.add("data/0", std::string(100, 'x'));
  archive.finish();
  return archive.bytes();
}

// Entries behind more than 4 GiB, and of that size: the directory alone tells.
TEST(Archive, KnowsLargeOffsetsAndSizes) {
  constexpr uint64_t kFourGiB = uint64_t{1} << 32;
  for (const uint64_t size : {kFourGiB - 5000, kFourGiB - 2, kFourGiB - 1, kFourGiB, 3 * kFourGiB}) {
    ArchiveWriter archive;
    archive.add("data.pkl", kPickle);
    archive.begin("data/0", size);
    archive.end(0x01020304);
    archive.add("version", "3\n");
    archive.finish();
    const std::string& bytes = archive.bytes();
    const auto tail = view(bytes).last(std::min<size_t>(bytes.size(), 2048));
    const auto directory = find_directory(tail, archive.position());
    ASSERT_TRUE(directory) << size;
    ASSERT_EQ(directory->entries, 3u);
    const auto entries = parse_directory(view(bytes).subspan(directory->offset - size, directory->size), *directory);
    ASSERT_TRUE(entries) << size;
    for (size_t i = 0; i < entries->size(); ++i) {
      EXPECT_EQ((*entries)[i].name, archive.entries()[i].name);
      EXPECT_EQ((*entries)[i].size, archive.entries()[i].size);
      EXPECT_EQ((*entries)[i].header_offset, archive.entries()[i].header_offset);
    }
    EXPECT_EQ((*entries)[1].crc, 0x01020304u);
    // The reader finds the body behind a header that it reads by itself.
    const ArchiveEntry& last = (*entries)[2];
    const uint64_t at = body_offset(view(bytes).subspan(last.header_offset - size), last);
    EXPECT_EQ(bytes.substr(at - size, 2), "3\n");
  }
}

TEST(Archive, NoticesChangedBodies) {
  const std::string good = small_archive();
  for (const char* name : {"/data.pkl", "/data/0"}) {
    const auto body = body_of(view(good), name);
    const auto start = static_cast<size_t>(body.data() - view(good).data());
    for (size_t at = start; at < start + body.size(); ++at) {
      std::string bad = good;
      bad[at] = static_cast<char>(bad[at] ^ 4);
      EXPECT_NE(check_archive(view(bad)).find(name), std::string::npos) << at;
    }
  }
}

// Whatever comes in: an answer and no step outside (AddressSanitizer watches the exact end).
void survive(std::string_view bytes) {
  const std::vector<char> exact(bytes.begin(), bytes.end());
  const std::string_view archive(exact.data(), exact.size());
  check_archive(view(archive));
  if (const auto body = find_pickle(view(archive))) {
    ASSERT_GE(body->data(), view(archive).data());
    ASSERT_LE(body->data() + body->size(), view(archive).data() + archive.size());
  }
}

TEST(Archive, SurvivesEveryLength) {
  const std::string good = golden("float32_2x3");
  for (size_t length = 0; length < good.size(); ++length) {
    EXPECT_NE(check_archive(view(good.substr(0, length))), "") << length;
    survive(good.substr(0, length));
    survive(good.substr(length));
  }
}

TEST(Archive, SurvivesChangedBytes) {
  std::mt19937 random(1);
  for (const std::string& good : {small_archive(), golden("float32_2x3")}) {
    for (size_t at = 0; at < good.size(); ++at) {
      for (const int value : {0x00, 0x01, 0x7f, 0x80, 0xff}) {
        std::string bad = good;
        bad[at] = static_cast<char>(value);
        survive(bad);
      }
    }
    for (int round = 0; round < 3000; ++round) {  // mostly in the directory and the ends
      std::string bad = good;
      for (unsigned changes = 1 + random() % 6; changes != 0; --changes) {
        const size_t span = random() % 4 == 0 ? bad.size() : 300;
        bad[bad.size() - 1 - random() % span] = static_cast<char>(random());
      }
      survive(bad);
    }
  }
}

TEST(Archive, RefusesWhatItCannotRead) {
  const std::string good = small_archive();
  const size_t central = good.find("PK\1\2");
  const auto refuse = [&](size_t at, char value, const char* what) {
    std::string bad = good;
    bad[at] = value;
    EXPECT_EQ(check_archive(view(bad)), "the archive's directory is damaged") << what;
  };
  refuse(central + 10, 8, "compressed");
  refuse(central + 8, 1, "encrypted");
  refuse(central + 24, 77, "two sizes");
  refuse(good.size() - 2, 1, "a comment");
  EXPECT_EQ(check_archive({}), "the archive's directory is damaged");
  EXPECT_EQ(check_archive(view("PK\5\6")), "the archive's directory is damaged");
  EXPECT_EQ(check_archive(view(good + "x")), "the archive's directory is damaged");
  EXPECT_EQ(check_archive(view("x" + good)), "the archive's directory is damaged");
}

// torch.serialization.set_crc32_options(False) leaves zeros.
TEST(Archive, MayHaveNoChecksums) {
  ArchiveWriter archive;
  archive.begin("data/0", 3);
  const size_t body = archive.bytes().size();
  archive.end(0);
  archive.finish();
  std::string bytes = archive.bytes();
  EXPECT_EQ(check_archive(view(bytes.insert(body, "abc"))), "");
}

TEST(Archive, MayHaveItsChecksumsLeftAlone) {
  std::string bytes = small_archive();
  const auto body = body_of(view(bytes), "/data/0");
  bytes[static_cast<size_t>(body.data() - view(bytes).data())] = 'y';
  EXPECT_NE(check_archive(view(bytes)), "");
  EXPECT_EQ(check_archive(view(bytes), false), "");
}

// What must not be unpickled is damage, whatever its checksum says.
TEST(Archive, HasASoundPickle) {
  for (const bool checksums : {true, false}) {
    ArchiveWriter archive;
    archive.add("data.pkl", "X\xff\xff\xff\xffN.");
    archive.finish();
    EXPECT_NE(check_archive(view(archive.bytes()), checksums).find("archive/data.pkl"), std::string::npos);
  }
}

TEST(Archive, OfOnePickleAlone) {
  const std::string object = golden("object");
  EXPECT_EQ(text(*find_pickle(view(object))), text(body_of(view(object), "/data.pkl")));
  EXPECT_FALSE(find_pickle(view(golden("float32_2x3"))));  // has a storage
  EXPECT_FALSE(find_pickle(view(object.substr(1))));
  const auto of = [](std::initializer_list<const char*> names) {
    ArchiveWriter archive;
    for (const char* name : names) archive.add(name, kPickle);
    archive.finish();
    return find_pickle(view(archive.bytes())).has_value();
  };
  EXPECT_TRUE(of({"data.pkl", "version"}));
  EXPECT_FALSE(of({}));
  EXPECT_FALSE(of({"version", "data.pkl"}));
  EXPECT_FALSE(of({"data.pkl", "data.pkl"}));
  EXPECT_FALSE(of({"data.pkl", "data/0"}));
  EXPECT_FALSE(of({"folder/data.pkl", "version"}));
}

}  // namespace
}  // namespace vescale_ckpt::format
