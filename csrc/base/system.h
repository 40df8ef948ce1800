// The one seam to the operating system: every system call of the engine passes here, so that a test can fail any of
// them.
//
// Functions return what the system call returns, or -errno; they never throw. Thread-safe.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace vescale_ckpt {

enum class Call {
  open,
  read,
  write,
  allocate,
  truncate,
  sync,
  sync_directory,
  rename,
  unlink,
  space,
  map,
  protect,
  advise,
  populate,
  peek,
  link,
  exchange,
  close,
};

// Alignments that direct I/O on a file requires, from statx. Zeros: no direct I/O, also on tmpfs, which accepts
// O_DIRECT but copies to the page cache all the same.
struct DirectRules {
  uint32_t memory_alignment = 0;  // bytes
  uint32_t offset_alignment = 0;  // bytes
};

namespace system {

int open(const char* path, int flags, mode_t mode);
// Opens to read. The client of a network file system may take a file for missing, or for an older one that is gone
// (ESTALE), until it asks its server: then the directory is opened, which makes it ask, and the file once more.
int open_to_read(const char* path, int flags);
// Network file systems report here what they could not write. The descriptor is gone in any case.
int close(int fd);
int64_t read(int fd, void* data, size_t size, uint64_t offset);
int64_t write(int fd, const void* data, size_t size, uint64_t offset);
// Reserves blocks without writing zeros; -EOPNOTSUPP where the file system cannot.
int allocate(int fd, uint64_t size);
int truncate(int fd, uint64_t size);
int sync(int fd);
int sync_directory(const char* path);
int rename(const char* from, const char* to);
int unlink(const char* path);
// A second name for a file; -EEXIST where there is something of that name.
int link(const char* from, const char* to);
// Two names change places in one step; -EINVAL, -ENOSYS or -EOPNOTSUPP where the file system cannot.
int exchange(const char* first, const char* second);
// The bytes that are free for this user; nullopt where the file system does not tell: it says that it has no block, or
// one. Mounts of remote storage do so, some only until their server has answered.
int free_bytes(const char* path, std::optional<uint64_t>& bytes);
// -EINVAL for what is not a regular file.
int64_t file_size(int fd);
bool is_in_memory(int fd);  // of a file on tmpfs
DirectRules direct_rules(int fd);
// Bytes of the file that are in the page cache; nullopt where the kernel does not tell.
std::optional<uint64_t> resident_bytes(int fd, uint64_t size);

// --- Memory. The size of a page: 4 KiB, or 64 KiB on some systems for 64-bit Arm.
uint64_t page_bytes();
// For tests: from now on a page is as large as this, and memory calls refuse what begins inside of one; 0: as it is.
void pretend_page_bytes(uint64_t bytes);
// Reserves addresses without memory behind them; returns the first, or -errno.
int64_t reserve_addresses(uint64_t bytes);
void release_addresses(std::byte* address, uint64_t bytes);
int make_writable(std::byte* address, uint64_t bytes);
int advise(std::byte* address, uint64_t bytes, int advice);
// Takes pages for writable memory, which keeps what it holds; -EINVAL where the kernel has no such call.
int populate(std::byte* address, uint64_t bytes);
// Lets pages that are taken from now on lie on a node of memory, where it has some left; nullopt: wherever they would.
int prefer_node(std::byte* address, uint64_t bytes, std::optional<int> node);

// Copies memory of this process that another thread may unmap meanwhile. Returns the bytes copied, which may be fewer,
// or -EFAULT where it is unmapped. -ENOSYS or -EPERM where the kernel or a sandbox has no such call.
int64_t peek(std::byte* target, const std::byte* source, uint64_t bytes);

// Sleeps while the word, which other processes may map, has this value, at most so many seconds. 0 or -errno: -EAGAIN
// where it has another value, -ETIMEDOUT, -EINTR. It may also return early.
int wait_for_change(const uint32_t* word, uint32_t value, double seconds);
void wake_waiters(const uint32_t* word);

// Lowers the calling thread's priority, and no other's, by `niceness`. Its priority in I/O follows, where it has none
// of its own: the kernel derives it.
int lower_priority(int niceness);

// The status with which this process ends where it would end with 0; 0 takes it back. Forked processes keep their own.
void set_exit_status(int status);

// --- Faults, for tests. A fault waits for the `skip`-th call of its kind from now on, then lets `times` calls fail
// with -`error`; error 0 makes a transfer short (half of its bytes, at least one block). ENOENT for a rename and EEXIST
// for a link are told after they were done, as by a server whose first answer was lost.
void inject_fault(Call call, int error, uint64_t skip, uint64_t times);
void clear_faults();
// How often each call was made since clear_faults(); counted only while a fault is armed.
uint64_t calls_seen(Call call);
std::optional<Call> call_named(const std::string& name);

}  // namespace system
}  // namespace vescale_ckpt
