#include "io/commit.h"

#include <atomic>
#include <cerrno>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "error_of.h"
#include "scratch.h"

namespace vescale_ckpt::io {
namespace {

class CommitTest : public ScratchTest {
 protected:
  // The errno of a commit of "new" without replacing; 0 if it succeeds.
  int commit() const {
    const std::string content = "new";
    try {
      commit_file(directory(), "file", std::as_bytes(std::span(content)), false);
    } catch (const Error& error) {
      return error.code;
    }
    return 0;
  }
};

// --- Written in pieces

constexpr uint64_t kPieceBytes = 1000;

std::string piece(uint64_t offset) {
  return std::string(kPieceBytes, static_cast<char>('a' + offset / kPieceBytes % 26));
}

std::string pieces(uint64_t count) {
  std::string all;
  for (uint64_t at = 0; at < count; ++at) all += piece(at * kPieceBytes);
  return all;
}

void write_piece(PendingFile& file, uint64_t offset) {
  const std::string content = piece(offset);
  file.write(offset, std::as_bytes(std::span(content)));
}

// The last pieces first, from several threads.
void write_pieces(PendingFile& file, uint64_t count) {
  std::atomic<uint64_t> left = count;
  std::vector<std::thread> threads;
  for (int number = 0; number < 4; ++number) {
    threads.emplace_back([&] {
      for (uint64_t next = left--; next != 0 && next <= count; next = left--)
        write_piece(file, (next - 1) * kPieceBytes);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_F(CommitTest, OfPiecesIsWholeOrNotThere) {
  write_file(path("file"), "old");
  PendingFile file(directory(), "file");
  write_pieces(file, 200);
  EXPECT_EQ(file.size(), 200 * kPieceBytes);
  EXPECT_EQ(read_file(path("file")), "old");
  file.check();
  EXPECT_EQ(read_file(path("file")), "old");
  file.commit();
  EXPECT_EQ(read_file(path("file")), pieces(200));
  EXPECT_EQ(files(), (std::set<std::string>{"file"}));
  file.discard();
  EXPECT_EQ(read_file(path("file")), pieces(200));
}

TEST_F(CommitTest, OfLargePiecesIsWhole) {
  const std::string large(3 << 20, 'l');
  PendingFile file(directory(), "file");
  file.write(large.size(), std::as_bytes(std::span(large)));
  file.write(0, std::as_bytes(std::span(large)));
  file.commit(false);
  EXPECT_EQ(read_file(path("file")), large + large);
}

TEST_F(CommitTest, OfPiecesKeepsWhatHasTheName) {
  PendingFile file(directory(), "file");
  write_pieces(file, 3);
  write_file(path("file"), "of another");
  EXPECT_THROW(file.commit(false), Error);
  EXPECT_EQ(read_file(path("file")), "of another");
  EXPECT_EQ(files(), (std::set<std::string>{"file"}));
}

TEST_F(CommitTest, OfPiecesThatIsGivenUpLeavesNothing) {
  {
    PendingFile file(directory(), "file");
    write_pieces(file, 3);
    EXPECT_EQ(files().size(), 1U);
  }
  EXPECT_TRUE(files().empty());
  PendingFile file(directory(), "file");
  write_pieces(file, 3);
  file.discard();
  EXPECT_TRUE(files().empty());
  EXPECT_THROW(file.commit(), Error);
  EXPECT_TRUE(files().empty());
}

// The errno and the offset that a commit tells.
std::pair<int, uint64_t> failure_of(PendingFile& file, bool by_check) {
  try {
    by_check ? file.check() : file.commit();
  } catch (const Error& error) {
    return {error.code, error.offset};
  }
  return {};
}

TEST_F(CommitTest, TellsTheErrorThatLiesFirst) {
  write_file(path("file"), "old");
  for (const bool by_check : {false, true}) {
    PendingFile file(directory(), "file");
    {
      const ArmedFault fault(Call::write, EIO, 0, 2);
      write_piece(file, 5 * kPieceBytes);
      write_piece(file, 2 * kPieceBytes);
      write_piece(file, 7 * kPieceBytes);  // nobody needs it
      EXPECT_EQ(system::calls_seen(Call::write), 2U);
    }
    write_piece(file, 0);
    EXPECT_EQ(file.size(), 8 * kPieceBytes);
    EXPECT_EQ(failure_of(file, by_check), (std::pair<int, uint64_t>(EIO, 2 * kPieceBytes)));
    EXPECT_EQ(read_file(path("file")), "old");
    EXPECT_EQ(files(), (std::set<std::string>{"file"}));
  }
}

TEST_F(CommitTest, ThatCannotMakeAFileTellsItAfterThePieces) {
  const ArmedFault fault(Call::open, EACCES);
  PendingFile file(directory(), "file");
  write_pieces(file, 3);
  EXPECT_EQ(file.size(), 3 * kPieceBytes);
  EXPECT_EQ(failure_of(file, false), (std::pair<int, uint64_t>(EACCES, 0)));
  EXPECT_TRUE(files().empty());
}

// --- Without replacing

TEST_F(CommitTest, WhoseAnswerWasLostIsDone) {
  const ArmedFault fault(Call::link, EEXIST);
  EXPECT_EQ(commit(), 0);
  EXPECT_EQ(read_file(path("file")), "new");
  EXPECT_EQ(files(), (std::set<std::string>{"file"}));
}

TEST_F(CommitTest, OfAnotherErrorIsNoRename) {
  const ArmedFault fault(Call::link, EIO);
  EXPECT_EQ(commit(), EIO);
  EXPECT_TRUE(files().empty());
}

}  // namespace
}  // namespace vescale_ckpt::io
