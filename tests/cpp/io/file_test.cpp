#include "io/file.h"

#include "data_files.h"

namespace vescale_ckpt::io {
namespace {

class FileTest : public ScratchTest {};

TEST_F(FileTest, ReadsWhatIsCachedFromTheCache) {
  const std::string cold = path("cold");
  write_file(cold, std::string(1 << 20, 'c'));
  drop_cache(cold);
  const auto file = File::open(cold, Access::direct);
  EXPECT_EQ(file->size(), 1u << 20);
  EXPECT_EQ(file->access(), File::create(path("new"), Access::direct)->access());
  EXPECT_EQ(File::open(cold, Access::buffered)->access(), Access::buffered);
  EXPECT_EQ(read_file(cold).size(), 1u << 20);  // now it is cached
  EXPECT_EQ(File::open(cold, Access::direct)->access(), Access::buffered);
  write_file(path("empty"), "");
  EXPECT_EQ(File::open(path("empty"), Access::direct)->size(), 0u);
}

}  // namespace
}  // namespace vescale_ckpt::io
