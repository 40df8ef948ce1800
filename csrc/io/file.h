// One file on disk and the way its bytes travel: direct (past the page cache), uncached (through it, pages dropped at
// once), or buffered. The way is found by trying, falls back at the first refusal, and is reported.
//
// A File owns its descriptors. Several threads may make transfers on one File at a time. All of these throw Error (io,
// full).
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

namespace vescale_ckpt::io {

enum class Access { direct, uncached, buffered };
const char* access_name(Access access);

class File {
 public:
  // Creates a file that must not exist. `widest` is the most ambitious access to try.
  static std::unique_ptr<File> create(const std::string& path, Access widest);
  // Opens a file to write to, of which others may write other parts.
  static std::unique_ptr<File> open_shared(const std::string& path, Access widest);
  // Opens for reading; with `cached` picks buffered if most of the file is in the page cache already.
  static std::unique_ptr<File> open(const std::string& path, Access widest, bool cached = true);
  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  const std::string& path() const { return path_; }
  uint64_t size() const { return size_; }  // at open; files being written: what was set last
  Access access() const { return access_.load(std::memory_order_relaxed); }
  uint64_t memory_alignment() const { return memory_alignment_; }  // bytes, for direct transfers

  int descriptor(Access access) const { return access == Access::direct ? direct_ : plain_; }
  // The flag for preadv2 and pwritev2.
  static int transfer_flags(Access access);
  // After `refused` failed with EINVAL or EOPNOTSUPP: the next way to try. False if there is none.
  bool fall_back(Access refused);
  static bool is_refusal(int error);
  // After a read failed with ESTALE: opens the file of that name again. False if there is none of the same size.
  bool reopen();

  void preallocate(uint64_t size);  // where supported, reserves space: fails with Kind::full when there is none
  void truncate(uint64_t size);
  void sync();
  // After the last write: throws where the system tells only now that it could not write.
  void close();
  // Starts write-back of buffered data so that the final sync is short; no effect otherwise.
  void start_writeback(uint64_t offset, uint64_t size);
  // The same for all that is in the page cache, however the rest of the file travels.
  void write_back();

 private:
  File(std::string path, int plain, int direct, Access access);
  static std::unique_ptr<File> for_writing(const std::string& path, int plain, Access widest);
  std::string path_;
  int plain_;
  int direct_;  // -1 where refused
  uint64_t size_ = 0;
  uint64_t memory_alignment_ = 1;
  std::atomic<Access> access_;
};

}  // namespace vescale_ckpt::io
