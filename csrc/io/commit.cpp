#include "io/commit.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <memory>
#include <utility>

#include "base/crc32.h"
#include "base/error.h"
#include "base/system.h"
#include "io/file.h"
#include "io/transfer.h"

namespace vescale_ckpt::io {
namespace {

constexpr uint64_t kLarge = 1 << 20;  // a file or piece of fewer bytes waits for the sync

bool is_there(const std::string& path) {
  struct stat found{};
  return ::lstat(path.c_str(), &found) == 0;
}

bool are_one_file(const std::string& first, const std::string& second) {
  struct stat one{}, other{};
  return ::lstat(first.c_str(), &one) == 0 && ::lstat(second.c_str(), &other) == 0 && one.st_dev == other.st_dev &&
         one.st_ino == other.st_ino;
}

// Renames. Where an answer was lost, the client of a network file system asks again, and the second try fails although
// the first one did it: whether it was done shows in the file that has the name.
int rename_surely(const std::string& from, const std::string& to) {
  struct stat before{}, after{};
  const bool known = ::lstat(from.c_str(), &before) == 0;
  const int result = system::rename(from.c_str(), to.c_str());
  if (result == -ENOENT && known && !is_there(from) && ::lstat(to.c_str(), &after) == 0 &&
      after.st_dev == before.st_dev && after.st_ino == before.st_ino) {
    return 0;
  }
  return result;
}

// Whether a second name was refused although the name is free: FAT and some FUSE mounts have none, a file takes so many
// at most, and a kernel or a security module may forbid them to this user.
bool refuses_links(int result) {
  constexpr std::array kRefusals = {-EPERM, -EACCES, -EOPNOTSUPP, -ENOSYS, -EINVAL, -EMLINK};
  return std::find(kRefusals.begin(), kRefusals.end(), result) != kRefusals.end();
}

// The start of a small file of the kernel; empty if it cannot be read.
std::string text_of(const char* path) {
  std::array<char, 64> text{};
  const int fd = ::open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return {};
  const ssize_t length = ::read(fd, text.data(), text.size());
  ::close(fd);
  return {text.data(), static_cast<size_t>(std::max<ssize_t>(length, 0))};
}

std::string made_process_space() {
  std::array<char, 256> text{};
  std::string machine = text_of("/proc/sys/kernel/random/boot_id");
  if (machine.empty() && ::gethostname(text.data(), text.size() - 1) == 0) machine = text.data();
  const ssize_t length = ::readlink("/proc/self/ns/pid", text.data(), text.size());
  const std::string space = length > 0 ? std::string(text.data(), static_cast<size_t>(length))
                                       : "process " + std::to_string(::getpid()) + " alone";
  const std::string both = machine + space;
  std::array<char, 9> digits{};
  std::snprintf(digits.data(), digits.size(), "%08x", crc32(0, both.data(), both.size()));
  return digits.data();
}

}  // namespace

const std::string& process_space() {
  static const std::string space = made_process_space();
  return space;
}

PendingFile::PendingFile(const std::string& directory, const std::string& name)
    : directory_(directory), path_(directory + "/" + name), fd_(-EEXIST) {
  static std::atomic<unsigned> serial{0};
  // A process of this number may have been killed here before.
  for (int tries = 0; fd_ == -EEXIST && tries < 1000; ++tries) {
    temporary_ = path_ + ".tmp." + std::to_string(::getpid()) + "." + std::to_string(serial++) + "." + process_space();
    fd_ = system::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL, 0666);
  }
  if (fd_ < 0) keep(Error::system("create", std::exchange(temporary_, {}), 0, -fd_));
}

void PendingFile::write(uint64_t offset, std::span<const std::byte> bytes) {
  {
    const std::lock_guard lock(mutex_);
    size_ = std::max(size_, offset + bytes.size());
    if (error_ && error_->offset <= offset) return;
  }
  for (uint64_t done = 0; done < bytes.size();) {
    const int64_t result =
        system::write(fd_, bytes.data() + done, std::min<uint64_t>(bytes.size() - done, 1 << 30), offset + done);
    if (result == -EINTR) continue;
    if (result <= 0) {
      return keep(Error::system("write", temporary_, offset + done, result == 0 ? EIO : static_cast<int>(-result)));
    }
    done += static_cast<uint64_t>(result);
  }
  if (bytes.size() >= kLarge) {
    ::sync_file_range(fd_, static_cast<off_t>(offset), static_cast<off_t>(bytes.size()), SYNC_FILE_RANGE_WRITE);
  }
}

void PendingFile::keep(Error error) {
  const std::lock_guard lock(mutex_);
  if (!error_ || error.offset < error_->offset) error_ = std::move(error);
}

void PendingFile::check() {
  if (!error_) return;
  discard();
  throw *error_;
}

void PendingFile::commit(bool replace) {
  check();
  try {
    if (const int result = system::sync(fd_); result < 0) throw Error::system("sync", temporary_, 0, -result);
    if (const int result = system::close(std::exchange(fd_, -1)); result < 0) {
      throw Error::system("close", temporary_, size_, -result);
    }
  } catch (...) {
    discard();
    throw;
  }
  move_into_place(std::exchange(temporary_, {}), directory_, path_, replace);
}

void PendingFile::discard() noexcept {
  if (fd_ >= 0) system::close(fd_);
  fd_ = -1;
  if (!temporary_.empty()) system::unlink(temporary_.c_str());
  temporary_.clear();
}

void commit_file(const std::string& directory, const std::string& name, std::span<const std::byte> bytes,
                 bool replace) {
  PendingFile file(directory, name);
  file.write(0, bytes);
  file.commit(replace);
}

void move_into_place(const std::string& temporary, const std::string& directory, const std::string& path,
                     bool replace) {
  try {
    replace ? rename_file(temporary, path) : rename_if_free(temporary, path);
  } catch (...) {
    system::unlink(temporary.c_str());
    throw;
  }
  sync_directory(directory);
}

void reserve_file(const std::string& path, uint64_t bytes) {
  const std::unique_ptr<File> file = File::create(path, Access::buffered);
  try {
    file->preallocate(bytes);
    file->close();
  } catch (...) {
    system::unlink(path.c_str());
    throw;
  }
}

void write_head(const std::string& path, std::span<const std::byte> head, bool sync) {
  const std::unique_ptr<File> file = File::open_shared(path, Access::buffered);
  write_exactly(*file, 0, head);
  if (sync) file->sync();
  file->close();
}

void rename_file(const std::string& from, const std::string& to) {
  if (const int result = rename_surely(from, to); result < 0) {
    throw Error::system("rename into place", to, 0, -result);
  }
}

void link_file(const std::string& from, const std::string& to) {
  if (const int result = system::link(from.c_str(), to.c_str()); result < 0) {
    throw Error::system("link", to, 0, -result);
  }
}

// A rename replaces, and only local file systems have one that does not (RENAME_NOREPLACE). All that have hard links
// make them in one step, or refuse with EEXIST: so the file gets the name as its second one, and loses the first. The
// two names are one file also where the answer to a link was lost and the second try failed.
void rename_if_free(const std::string& from, const std::string& to) {
  int result = system::link(from.c_str(), to.c_str());
  if (result >= 0 || are_one_file(from, to)) {
    system::unlink(from.c_str());  // done already; a temporary name that stays is an orphan
    return;
  }
  if (refuses_links(result)) result = is_there(to) ? -EEXIST : rename_surely(from, to);
  if (result < 0) throw Error::system("rename without replacing", to, 0, -result);
}

bool remove_file(const std::string& path) {
  const int result = system::unlink(path.c_str());
  if (result == -ENOENT) return false;
  if (result < 0) throw Error::system("unlink", path, 0, -result);
  return true;
}

bool exchange_names(const std::string& first, const std::string& second) {
  const int result = system::exchange(first.c_str(), second.c_str());
  if (result == -EINVAL || result == -ENOSYS || result == -EOPNOTSUPP) return false;
  if (result < 0) throw Error::system("exchange names with", second, 0, -result);
  return true;
}

void sync_directory(const std::string& directory) {
  if (const int result = system::sync_directory(directory.c_str()); result < 0) {
    throw Error::system("sync directory", directory, 0, -result);
  }
}

}  // namespace vescale_ckpt::io
