#include "io/commit.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include "base/error.h"
#include "scratch.h"

namespace vescale_ckpt::io {
namespace {

std::span<const std::byte> bytes(std::string_view text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

class Commit : public ScratchTest {
 protected:
  void commit(std::string_view text) const { commit_file(directory(), "name", bytes(text)); }
  std::string content() const { return read_file(path("name")); }
};

TEST_F(Commit, MakesAndReplacesAFile) {
  commit("first");
  EXPECT_EQ(content(), "first");
  commit("second, and longer");
  EXPECT_EQ(content(), "second, and longer");
  commit("");
  EXPECT_EQ(content(), "");
  EXPECT_EQ(files(), (std::set<std::string>{"name"}));
}

TEST_F(Commit, TellsInTheTemporaryNameWhoseFileItIs) {
  EXPECT_EQ(process_space().size(), 8u);
  EXPECT_EQ(process_space().find_first_not_of("0123456789abcdef"), std::string::npos);
  const ArmedFault fault(Call::write, EIO);
  try {
    commit("new");
    FAIL();
  } catch (const Error& error) {
    const std::string process = ".tmp." + std::to_string(::getpid()) + ".";
    EXPECT_EQ(error.path.find(path("name") + process), 0u) << error.path;
    EXPECT_TRUE(error.path.ends_with("." + process_space())) << error.path;
  }
}

// Whatever fails before the rename: the old file stays and nothing else is left.
TEST_F(Commit, KeepsTheOldFileWhenAnythingFails) {
  commit("old");
  for (const Call call : {Call::open, Call::write, Call::sync, Call::close, Call::rename}) {
    for (const int code : {EIO, ENOSPC}) {
      const ArmedFault fault(call, code);
      try {
        commit("new");
        FAIL() << "call " << static_cast<int>(call);
      } catch (const Error& error) {
        EXPECT_EQ(error.code, code);
        EXPECT_EQ(error.kind, code == ENOSPC ? Error::Kind::full : Error::Kind::io);
        EXPECT_EQ(error.path.find(path("name")), 0u) << error.path;
      }
      EXPECT_EQ(content(), "old");
      EXPECT_EQ(files(), (std::set<std::string>{"name"}));
    }
  }
  commit("new");
  EXPECT_EQ(content(), "new");
}

// A network file system asks its server again when an answer was lost, and hears that there is nothing to rename.
TEST_F(Commit, TakesARenameForDoneThatWasDone) {
  commit("old");
  const ArmedFault fault(Call::rename, ENOENT);
  commit("new");
  EXPECT_EQ(content(), "new");
  EXPECT_EQ(files(), (std::set<std::string>{"name"}));
}

TEST_F(Commit, LeavesNothingWhereThereWasNothing) {
  for (const Call call : {Call::open, Call::write, Call::sync, Call::rename}) {
    const ArmedFault fault(call, EIO);
    EXPECT_THROW(commit("new"), Error);
    EXPECT_TRUE(files().empty());
  }
}

TEST_F(Commit, SaysWhenTheDirectoryCannotBeSynced) {
  commit("old");
  const ArmedFault fault(Call::sync_directory, EIO);
  EXPECT_THROW(commit("new"), Error);
  EXPECT_EQ(content(), "new");  // in place already: whole, but not known to be durable
  EXPECT_EQ(files(), (std::set<std::string>{"name"}));
}

TEST_F(Commit, GoesOnAfterShortAndInterruptedWrites) {
  std::string text(100000, 'x');
  for (size_t at = 0; at < text.size(); ++at) text[at] = static_cast<char>(at * 31 + at / 256);
  {
    const ArmedFault fault(Call::write, 0, 0, 1000);  // short
    commit(text);
    EXPECT_GT(system::calls_seen(Call::write), 1u);
  }
  EXPECT_EQ(content(), text);
  {
    const ArmedFault fault(Call::write, EINTR, 0, 5);
    commit("after " + text);
  }
  EXPECT_EQ(content(), "after " + text);
}

TEST_F(Commit, FailsWithoutItsDirectory) {
  try {
    commit_file(path("missing"), "name", bytes("x"));
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code, ENOENT);
  }
  EXPECT_THROW(sync_directory(path("missing")), Error);
  EXPECT_NO_THROW(sync_directory(directory()));
}

// A process killed before its rename leaves its temporary file behind. In a container the next one may well have the
// same process id and start to count anew.
TEST_F(Commit, IsNotStoppedByWhatAKilledProcessLeft) {
  {
    const ArmedFault rename(Call::rename, EIO);
    system::inject_fault(Call::unlink, EIO, 0, 1);
    EXPECT_THROW(commit("torn"), Error);
  }
  ASSERT_EQ(files().size(), 1u);
  const std::string left = *files().begin();  // before the last dot is the number of this commit
  const size_t end = left.rfind('.'), digits = left.rfind('.', end - 1) + 1;
  const unsigned long number = std::stoul(left.substr(digits, end - digits));
  for (unsigned long next = number + 1; next < number + 4; ++next) {
    write_file(path(left.substr(0, digits) + std::to_string(next) + left.substr(end)), "torn");
  }
  EXPECT_NO_THROW(commit("whole"));
  EXPECT_EQ(content(), "whole");
}

}  // namespace
}  // namespace vescale_ckpt::io
