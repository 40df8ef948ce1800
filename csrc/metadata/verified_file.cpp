#include "metadata/verified_file.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <utility>

#include "base/crc32.h"
#include "base/error.h"
#include "base/system.h"

namespace vescale_ckpt::metadata {
namespace {

constexpr uint64_t kMostBytes = uint64_t{1} << 36;  // a hundred times what ten thousand ranks need

}  // namespace

VerifiedFile::VerifiedFile(std::string path) : path_(std::move(path)) {
  fd_ = system::open_to_read(path_.c_str(), O_RDONLY | O_NONBLOCK);  // without O_NONBLOCK, opening a FIFO would wait
  if (fd_ < 0) throw Error::system("open", path_, 0, -fd_);
  try {
    const int64_t size = system::file_size(fd_);
    if (size == -EINVAL) corrupt("is not a regular file", 0);
    if (size < 0) throw Error::system("ask for the size of", path_, 0, static_cast<int>(-size));
    size_ = static_cast<uint64_t>(size);
    if (size_ < kPiece || size_ > kMostBytes) corrupt("has an absurd length", 0);
    ::posix_fadvise(fd_, 0, 0, POSIX_FADV_WILLNEED);  // reads ahead, because pieces are small
    void* map = ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED) throw Error::system("make room for", path_, 0, errno);
    data_ = static_cast<std::byte*>(map);
    read(0, kPiece);
    ready_ = std::vector<std::atomic<bool>>(size_ / kPiece);
    ready_[0] = true;
  } catch (...) {
    if (data_ != nullptr) ::munmap(data_, size_);
    system::close(fd_);
    throw;
  }
}

VerifiedFile::VerifiedFile(std::vector<std::byte> content, std::string path)
    : path_(std::move(path)), size_(content.size()), content_(std::move(content)), data_(content_.data()) {
  if (size_ < kPiece) corrupt("has an absurd length", 0);
}

VerifiedFile::~VerifiedFile() {
  if (fd_ < 0) return;
  ::munmap(data_, size_);
  system::close(fd_);
}

void VerifiedFile::corrupt(const char* reason, uint64_t offset) const {
  throw Error::corrupt((path_.empty() ? "the index" : path_) + " " + reason, path_, offset);
}

void VerifiedFile::load_checksums(uint64_t table, uint32_t crc) {
  const uint64_t pieces = table / kPiece;
  if (table % kPiece != 0 || pieces == 0 || table > size_ || size_ - table != (pieces - 1) * sizeof(uint32_t)) {
    corrupt("is not as long as it says", 0);
  }
  if (fd_ >= 0) read(table, size_ - table);
  if (crc32(0, data_ + table, size_ - table) != crc)
    corrupt("is damaged: the checksum of its checksums differs", table);
  checksums_.resize(pieces - 1);
  std::copy_n(reinterpret_cast<const uint32_t*>(data_ + table), pieces - 1, checksums_.begin());
  if (fd_ >= 0) return;
  for (uint64_t piece = 1; piece < pieces; ++piece) check_piece(piece);
}

void VerifiedFile::read(uint64_t offset, uint64_t bytes) const {
  for (uint64_t done = 0; done < bytes;) {
    const int64_t result = system::read(fd_, data_ + offset + done, bytes - done, offset + done, 0);
    if (result == -EINTR) continue;
    if (result < 0) throw Error::system("read", path_, offset + done, static_cast<int>(-result));
    if (result == 0) corrupt("was cut short while it was read", offset + done);
    done += static_cast<uint64_t>(result);
  }
}

void VerifiedFile::check_piece(uint64_t piece) const {
  if (crc32(0, data_ + piece * kPiece, kPiece) != checksums_[piece - 1]) {
    corrupt("is damaged: the checksum of a piece differs", piece * kPiece);
  }
}

void VerifiedFile::read_piece(uint64_t piece) const {
  const std::lock_guard lock(reading_);
  if (ready_[piece].load(std::memory_order_relaxed)) return;
  read(piece * kPiece, kPiece);
  check_piece(piece);
  ready_[piece].store(true, std::memory_order_release);
}

}  // namespace vescale_ckpt::metadata
