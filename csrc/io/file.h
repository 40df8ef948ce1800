// One file and the way its bytes travel. On disk: direct (past the page cache) or buffered. The way is found by trying,
// falls back at the first refusal, and is reported.
//
// A file of a remote store (io/remote.h) has no descriptors; its bytes travel through a RemoteObject when it is read,
// and through a PartWindow when it is written. For transfers it looks buffered.
//
// A File owns its descriptors. Several threads may make transfers on one File at a time. All of these throw Error (io,
// full).
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "io/remote.h"

namespace vescale_ckpt::io {

enum class Access { direct, buffered };
const char* access_name(Access access);

class File {
 public:
  // Creates a file that must not exist. `widest` is the most ambitious access to try.
  static std::unique_ptr<File> create(const std::string& path, Access widest);
  // Opens a file to write to, of which others may write other parts. Remote stores have no such files.
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
  // After `refused` failed with EINVAL or EOPNOTSUPP: takes the next way. False if there is none.
  bool fall_back(Access refused);
  static bool is_refusal(int error);
  // After a read failed with ESTALE: opens the file of that name again. False if there is none of the same size.
  bool reopen();

  // A file that is read from a remote store, or null; one that is written to it, or null.
  RemoteObject* remote() const { return remote_.get(); }
  PartWindow* window() const { return window_.get(); }

  // Where supported, reserves space: fails with Kind::full when there is none. A remote file begins to be sent, in
  // parts of a multiple of `unit` bytes. `alone`: it is not one of several files that are written at a time.
  void begin(uint64_t expected_size, uint64_t unit, bool alone = true);
  // All is written, and so long is the file. It is durable afterwards, if asked for; a remote one always is.
  void complete(uint64_t size, bool sync);
  // Removes a file that was not completed. Throws nothing.
  void discard();
  // From any thread: makes calls that wait fail soon, or does nothing.
  void cancel();

  void preallocate(uint64_t size, bool alone = true);
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
  bool is_on_disk() const { return on_disk_; }  // also when it is closed
  static std::unique_ptr<File> for_writing(const std::string& path, int plain, Access widest);
  std::string path_;
  int plain_;
  int direct_;  // -1 where refused
  bool on_disk_;
  std::unique_ptr<RemoteObject> remote_;
  std::shared_ptr<PartWindow> window_;
  uint64_t size_ = 0;
  uint64_t memory_alignment_ = 1;
  std::atomic<Access> access_;
};

}  // namespace vescale_ckpt::io
