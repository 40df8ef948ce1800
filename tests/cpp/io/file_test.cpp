#include "io/file.h"

#include <cerrno>

#include "base/error.h"
#include "base/memory.h"
#include "data_files.h"
#include "error_of.h"

namespace vescale_ckpt::io {
namespace {

class FileTest : public ScratchTest {};

TEST_F(FileTest, IsCreatedWhereThereIsNone) {
  {
    const auto file = File::create(path("new"), Access::direct);
  }
  EXPECT_EQ(files(), (std::set<std::string>{"new"}));
  write_file(path("old"), "content");
  const Error error = error_of([&] { File::create(path("old"), Access::direct); });
  EXPECT_EQ(error.code, EEXIST);
  EXPECT_EQ(error.path, path("old"));
  EXPECT_EQ(read_file(path("old")), "content");
}

TEST_F(FileTest, TravelsAsAskedOrTheNextWay) {
  EXPECT_EQ(File::create(path("buffered"), Access::buffered)->access(), Access::buffered);
  EXPECT_EQ(File::create(path("uncached"), Access::uncached)->access(), Access::uncached);
  const auto direct = File::create(path("direct"), Access::direct);
  if (direct->access() == Access::direct) {
    EXPECT_GE(direct->descriptor(Access::direct), 0);
    EXPECT_NE(direct->descriptor(Access::direct), direct->descriptor(Access::buffered));
    EXPECT_LE(direct->memory_alignment(), kBlock);
  } else {
    EXPECT_EQ(direct->access(), Access::uncached);
  }
  const ArmedFault refused(Call::open, EINVAL, 1);  // no O_DIRECT here
  EXPECT_EQ(File::create(path("refused"), Access::direct)->access(), Access::uncached);
}

TEST_F(FileTest, FallsBackStepByStep) {
  const auto file = File::create(path("new"), Access::uncached);
  EXPECT_TRUE(file->fall_back(Access::direct));  // an old transfer: the file has gone on already
  EXPECT_EQ(file->access(), Access::uncached);
  EXPECT_TRUE(file->fall_back(Access::uncached));
  EXPECT_EQ(file->access(), Access::buffered);
  EXPECT_TRUE(file->fall_back(Access::uncached));
  EXPECT_TRUE(file->fall_back(Access::direct));
  EXPECT_FALSE(file->fall_back(Access::buffered));
  EXPECT_EQ(file->access(), Access::buffered);
  EXPECT_TRUE(File::is_refusal(EINVAL));
  EXPECT_TRUE(File::is_refusal(EOPNOTSUPP));
  EXPECT_FALSE(File::is_refusal(EIO));
  EXPECT_STREQ(access_name(Access::direct), "direct");
  EXPECT_STREQ(access_name(Access::uncached), "uncached");
  EXPECT_STREQ(access_name(Access::buffered), "buffered");
}

TEST_F(FileTest, ReadsWhatIsCachedFromTheCache) {
  const std::string cold = path("cold");
  write_file(cold, std::string(1 << 20, 'c'));
  drop_cache(cold);
  const auto file = File::open(cold, Access::direct);
  EXPECT_EQ(file->size(), 1u << 20);
  EXPECT_NE(file->access(), Access::buffered);
  EXPECT_EQ(File::open(cold, Access::buffered)->access(), Access::buffered);
  EXPECT_EQ(read_file(cold).size(), 1u << 20);  // now it is cached
  EXPECT_EQ(File::open(cold, Access::direct)->access(), Access::buffered);
  write_file(path("empty"), "");
  EXPECT_EQ(File::open(path("empty"), Access::direct)->size(), 0u);
}

TEST_F(FileTest, ReservesSpace) {
  const auto file = File::create(path("new"), Access::direct);
  file->preallocate(3 << 20);
  EXPECT_EQ(file->size(), 3u << 20);
  EXPECT_EQ(std::filesystem::file_size(path("new")), 3u << 20);
  file->truncate(1000);
  EXPECT_EQ(file->size(), 1000u);
  EXPECT_EQ(std::filesystem::file_size(path("new")), 1000u);
  EXPECT_NO_THROW(file->sync());
}

}  // namespace
}  // namespace vescale_ckpt::io
