// Makes files appear whole or not at all, under their names. All of these throw Error (io, full).
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <string>

#include "base/error.h"

namespace vescale_ckpt::io {

// Eight hexadecimal digits, equal for processes that find each other by number in /proc: of one boot of a machine and
// one namespace of processes. They end temporary names, so that nobody judges by /proc whether another machine's
// process lives.
const std::string& process_space();

// A file that is written under the temporary name `{name}.tmp.{process}.{n}.{process_space}` in `directory`. A reader
// of `name` sees the old file or the new one. Errors of the constructor and of `write` are kept for `check` and
// `commit`: of several the one that lies first in the file.
class PendingFile {
 public:
  PendingFile(const std::string& directory, const std::string& name);
  ~PendingFile() { discard(); }
  PendingFile(const PendingFile&) = delete;
  PendingFile& operator=(const PendingFile&) = delete;

  // Several threads may call it. The disk begins to write large pieces at once.
  void write(uint64_t offset, std::span<const std::byte> bytes);

  // These come after all calls of `write`.
  uint64_t size() const { return size_; }  // where the last byte given to `write` ends, also after an error
  // Throws the error that was kept, and removes the file.
  void check();
  // Syncs, renames to `name`, syncs the directory. On any error before the rename the temporary file is removed and the
  // old one stays. Without `replace` there may be no old one, as for `rename_if_free`.
  void commit(bool replace = true);
  // Removes the file, unless it is committed.
  void discard() noexcept;

 private:
  void keep(Error error);

  std::string directory_, path_, temporary_;  // no temporary name: committed, or removed
  int fd_ = -1;
  std::mutex mutex_;  // guards what follows
  uint64_t size_ = 0;
  std::optional<Error> error_;
};

// Writes, syncs and commits a `PendingFile` of such content.
void commit_file(const std::string& directory, const std::string& name, std::span<const std::byte> bytes,
                 bool replace = true);

// The same for a file that is complete and synced: `temporary` becomes `path`, both in `directory`.
void move_into_place(const std::string& temporary, const std::string& directory, const std::string& path,
                     bool replace = true);

// Makes a file of so many bytes, with space for them on disk where the file system can reserve it; what is not written
// reads as zeros. Removes it again if that fails.
void reserve_file(const std::string& path, uint64_t bytes);

// Writes what stands at the start of a file whose rest is written, and syncs if asked to.
void write_head(const std::string& path, std::span<const std::byte> head, bool sync);

// Names, none of them durable before `sync_directory`. `rename` replaces what is there, `link` does not.
void rename_file(const std::string& from, const std::string& to);
void link_file(const std::string& from, const std::string& to);
// Renames unless there is something of that name: then throws Error with the code EEXIST. Of several that give the same
// name at once one succeeds. Where files cannot have a second name, it looks before it renames, and two may succeed.
void rename_if_free(const std::string& from, const std::string& to);
// False if it is not there.
bool remove_file(const std::string& path);
// Two files or folders change names in one step. False where the file system cannot do that.
bool exchange_names(const std::string& first, const std::string& second);

// Throws Error if the directory cannot be synced.
void sync_directory(const std::string& directory);

}  // namespace vescale_ckpt::io
