#include "io/file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "base/error.h"
#include "base/memory.h"
#include "base/system.h"

namespace vescale_ckpt::io {
namespace {

// Direct I/O is worth a second descriptor only where its rules fit our blocks.
int open_direct(const std::string& path, int flags, uint64_t& memory_alignment) {
  const int fd = system::open(path.c_str(), flags | O_DIRECT, 0);
  if (fd < 0) return -1;
  const DirectRules rules = system::direct_rules(fd);
  if (rules.offset_alignment == 0 || rules.offset_alignment > kBlock || rules.memory_alignment > kBlock) {
    system::close(fd);
    return -1;
  }
  memory_alignment = rules.memory_alignment == 0 ? 1 : rules.memory_alignment;
  return fd;
}

}  // namespace

const char* access_name(Access access) {
  return access == Access::direct ? "direct" : "buffered";
}

File::File(std::string path, int plain, int direct, Access access)
    : path_(std::move(path)), plain_(plain), direct_(direct), on_disk_(plain >= 0), access_(access) {}

File::~File() {
  if (direct_ >= 0) system::close(direct_);
  if (plain_ >= 0) system::close(plain_);
  cancel();
}

void File::close() {
  const int results[] = {direct_ >= 0 ? system::close(direct_) : 0, plain_ >= 0 ? system::close(plain_) : 0};
  direct_ = plain_ = -1;
  for (const int result : results) {
    if (result < 0) throw Error::system("close", path_, size_, -result);
  }
}

std::unique_ptr<File> File::create(const std::string& path, Access widest) {
  if (is_remote(path)) return std::unique_ptr<File>(new File(path, -1, -1, Access::buffered));
  const int plain = system::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL, 0666);
  if (plain < 0) throw Error::system("create", path, 0, -plain);
  return for_writing(path, plain, widest);
}

std::unique_ptr<File> File::open_shared(const std::string& path, Access widest) {
  if (is_remote(path)) throw Error::invalid(path + ": several writers cannot fill one file of an object store");
  const int plain = system::open(path.c_str(), O_WRONLY, 0);
  if (plain < 0) throw Error::system("open to write to", path, 0, -plain);
  return for_writing(path, plain, widest);
}

std::unique_ptr<File> File::for_writing(const std::string& path, int plain, Access widest) {
  std::unique_ptr<File> file(new File(path, plain, -1, widest));
  if (widest == Access::direct) {
    file->direct_ = open_direct(path, O_WRONLY, file->memory_alignment_);
    if (file->direct_ < 0) file->access_ = Access::buffered;
  }
  return file;
}

std::unique_ptr<File> File::open(const std::string& path, Access widest, bool cached) {
  if (is_remote(path)) {
    std::unique_ptr<File> file(new File(path, -1, -1, Access::buffered));
    file->remote_ = remote_store().open(path);
    file->size_ = file->remote_->size();
    return file;
  }
  // Not blocking, because a FIFO of that name would wait for a writer; files do not care.
  const int plain = system::open_to_read(path.c_str(), O_RDONLY | O_NONBLOCK);
  if (plain < 0) throw Error::system("open", path, 0, -plain);
  std::unique_ptr<File> file(new File(path, plain, -1, widest));
  const int64_t size = system::file_size(plain);
  if (size < 0) throw Error::system("stat", path, 0, static_cast<int>(-size));
  file->size_ = static_cast<uint64_t>(size);
  if (widest == Access::buffered) return file;
  // What is in memory is read from there: four times faster than the disk, and no pages are added.
  const auto resident = cached ? system::resident_bytes(plain, file->size_) : std::nullopt;
  if (resident && *resident >= file->size_ - file->size_ / 8) {
    file->access_ = Access::buffered;
    return file;
  }
  file->direct_ = open_direct(path, O_RDONLY, file->memory_alignment_);
  if (file->direct_ < 0) file->access_ = Access::buffered;
  return file;
}

bool File::is_refusal(int error) {
  return error == EINVAL || error == EOPNOTSUPP;
}

bool File::reopen() {
  const int plain = system::open_to_read(path_.c_str(), O_RDONLY | O_NONBLOCK);
  if (plain < 0) return false;
  const int64_t size = system::file_size(plain);
  if (size < 0 || static_cast<uint64_t>(size) != size_) {
    system::close(plain);
    return false;
  }
  // The descriptors keep their numbers: other threads may use them at this moment.
  ::dup3(plain, plain_, O_CLOEXEC);
  system::close(plain);
  if (direct_ < 0) return true;
  if (const int direct = system::open(path_.c_str(), O_RDONLY | O_DIRECT, 0); direct >= 0) {
    ::dup3(direct, direct_, O_CLOEXEC);
    system::close(direct);
  } else {
    fall_back(Access::direct);
  }
  return true;
}

bool File::fall_back(Access refused) {
  if (refused == Access::buffered) return false;
  access_ = Access::buffered;
  return true;
}

void File::begin(uint64_t expected_size, uint64_t unit, bool alone) {
  if (is_on_disk()) {
    preallocate(expected_size, alone);
    return;
  }
  const RemoteStore& store = remote_store();
  const uint64_t most = store.most_part_bytes ? store.most_part_bytes(path_) : 0;
  window_ = std::make_shared<PartWindow>(path_, part_bytes_for(expected_size, unit, most));
  try {
    store.upload(window_);
  } catch (...) {
    window_.reset();  // nobody sends it
    throw;
  }
}

void File::complete(uint64_t size, bool sync) {
  if (is_on_disk()) {
    truncate(size);
    if (sync) this->sync();
    close();
    return;
  }
  window_->finish(size);
  size_ = size;
}

void File::discard() {
  if (is_on_disk()) {
    system::unlink(path_.c_str());
  } else if (window_) {
    window_->cancel();
    window_->wait_for_end();
  }
}

void File::cancel() {
  if (window_) window_->cancel();
}

void File::preallocate(uint64_t size, bool alone) {
  // tmpfs takes pages from the machine in one thread, which is a third of the time to fill them; in several files they
  // are taken by several threads while they are filled.
  const bool reserves = alone || !system::is_in_memory(plain_);
  int result = reserves ? system::allocate(plain_, size) : system::truncate(plain_, size);
  if (result == -EOPNOTSUPP || result == -ENOSYS || result == -EINVAL) result = system::truncate(plain_, size);
  if (result < 0) throw Error::system("reserve space for", path_, size, -result);
  size_ = size;
}

void File::truncate(uint64_t size) {
  if (const int result = system::truncate(plain_, size); result < 0) {
    throw Error::system("set the length of", path_, size, -result);
  }
  size_ = size;
}

void File::sync() {
  if (const int result = system::sync(plain_); result < 0) throw Error::system("sync", path_, 0, -result);
}

void File::write_back() {
  if (!is_on_disk()) return;
  ::sync_file_range(plain_, 0, 0, SYNC_FILE_RANGE_WRITE);
}

void File::start_writeback(uint64_t offset, uint64_t size) {
  if (access() != Access::buffered || !is_on_disk()) return;
  ::sync_file_range(plain_, static_cast<off_t>(offset), static_cast<off_t>(size), SYNC_FILE_RANGE_WRITE);
}

}  // namespace vescale_ckpt::io
