// Atomic creation and replacement of files. All functions throw Error (io, full).
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <string>

#include "base/error.h"

namespace vescale_ckpt::io {

// Identifies one boot and PID namespace (8 hex digits). Part of temporary names, so that a cleaner never mistakes
// another machine's PID for a dead local one.
const std::string& process_space();

// A file that is written under the temporary name `{name}.tmp.{pid}.{n}.{process_space}` in `directory`. A reader of
// `name` sees the old file or the new one. Errors of the constructor and of `write` are sticky: `check` and `commit`
// rethrow the one at the lowest file offset.
class PendingFile {
 public:
  PendingFile(const std::string& directory, const std::string& name);
  ~PendingFile() { discard(); }
  PendingFile(const PendingFile&) = delete;
  PendingFile& operator=(const PendingFile&) = delete;

  // Thread-safe. Starts writeback of large pieces immediately.
  void write(uint64_t offset, std::span<const std::byte> bytes);

  // The following must not run concurrently with `write`.
  uint64_t size() const { return size_; }  // end of the last byte passed to `write`, also after an error
  // Throws the sticky error, if any, and removes the file.
  void check();
  // Syncs, renames to `name`, syncs the directory. An error before the rename removes the temporary file and leaves the
  // old one untouched. Without `replace` it fails if `name` exists, as `rename_if_free`.
  void commit(bool replace = true);
  // Removes the file, unless it is committed.
  void discard() noexcept;

 private:
  void keep(Error error);

  std::string directory_, path_, temporary_;  // temporary_ is empty once committed or removed
  int fd_ = -1;
  std::mutex mutex_;  // guards all below
  uint64_t size_ = 0;
  std::optional<Error> error_;
};

// Writes and commits a `PendingFile` with the given content.
void commit_file(const std::string& directory, const std::string& name, std::span<const std::byte> bytes,
                 bool replace = true);

// Commits a complete and synced file: renames `temporary` to `path`, both in `directory`, and syncs the directory.
void move_into_place(const std::string& temporary, const std::string& directory, const std::string& path,
                     bool replace = true);

// Creates a file of `bytes` bytes that read as zeros, preallocated if the file system supports it. Removes it on
// failure.
void reserve_file(const std::string& path, uint64_t bytes);

// Writes the head of a file whose remainder is already written; syncs if `sync`.
void write_head(const std::string& path, std::span<const std::byte> head, bool sync);

// Directory operations, durable only after `sync_directory`. `rename_file` replaces an existing file, `link_file`
// fails.
void rename_file(const std::string& from, const std::string& to);
void link_file(const std::string& from, const std::string& to);
// Renames unless `to` exists; then throws Error with the code EEXIST. Of concurrent callers with the same `to`, exactly
// one succeeds, except on file systems without hard links, where the check and the rename are separate steps.
void rename_if_free(const std::string& from, const std::string& to);
// Returns false if the file does not exist.
bool remove_file(const std::string& path);
// Swaps two names atomically. Returns false if the file system does not support that.
bool exchange_names(const std::string& first, const std::string& second);

// Throws Error if the directory cannot be synced.
void sync_directory(const std::string& directory);

}  // namespace vescale_ckpt::io
