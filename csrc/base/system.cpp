#include "base/system.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <linux/magic.h>
#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>

namespace vescale_ckpt::system {
namespace {

constexpr size_t kCalls = 18;

struct Fault {
  bool armed = false;
  int error = 0;  // negative: a signal, which this process gets at the call
  uint64_t skip = 0;
  uint64_t times = 0;
};

std::atomic<bool> any_fault{false};  // the only thing looked at outside of tests
std::mutex fault_mutex;              // guards the two below
std::array<Fault, kCalls> faults;
std::array<uint64_t, kCalls> seen;
std::atomic<uint64_t> pretended_page_bytes{0};

// As the kernel would see it. What ends inside of a page ends with it.
bool begins_inside_a_page(const std::byte* address) {
  const uint64_t page = pretended_page_bytes.load(std::memory_order_relaxed);
  return page != 0 && reinterpret_cast<uintptr_t>(address) % page != 0;
}

int64_t with_faults(Call call, int64_t result) {
  if (!any_fault.load(std::memory_order_relaxed)) return result;
  const std::lock_guard lock(fault_mutex);
  ++seen[static_cast<size_t>(call)];
  Fault& fault = faults[static_cast<size_t>(call)];
  if (!fault.armed) return result;
  if (fault.skip != 0) {
    --fault.skip;
    return result;
  }
  if (fault.times == 0) return result;
  --fault.times;
  if (fault.error < 0) ::kill(::getpid(), -fault.error);
  if (fault.error != 0) return -fault.error;
  constexpr int64_t kBlock = 4096;
  return result <= 1 ? result : std::max<int64_t>(result / 2 / kBlock * kBlock, std::min(result - 1, kBlock));
}

int64_t or_errno(int64_t result) {
  return result < 0 ? -errno : result;
}

// The result of a call that was made, which may be turned into a failure.
int64_t completed(Call call, int64_t result) {
  return result < 0 ? -errno : with_faults(call, result);
}

// A call that may be failed before it is made, so that a fault on it leaves nothing behind. Repeated when a signal
// interrupted it.
template <typename Function>
int64_t guarded(Call call, Function function) {
  for (;;) {
    const int64_t fault = with_faults(call, 0);
    const int64_t result = fault < 0 ? fault : or_errno(function());
    if (result != -EINTR) return result;
  }
}

// A call that a fault `told` turns into a failure after it was made, and any other fault before.
template <typename Function>
int with_late_fault(Call call, int64_t told, Function function) {
  const int64_t fault = with_faults(call, 0);
  if (fault < 0 && fault != told) return static_cast<int>(fault);
  const int64_t result = or_errno(function());
  return static_cast<int>(result < 0 ? result : fault);
}

}  // namespace

int open(const char* path, int flags, mode_t mode) {
  return static_cast<int>(guarded(Call::open, [&] { return ::open(path, flags | O_CLOEXEC, mode); }));
}

int open_to_read(const char* path, int flags) {
  const int first = open(path, flags, 0);
  if (first != -ESTALE && first != -ENOENT) return first;
  const std::string text(path);
  const size_t slash = text.rfind('/');
  const std::string directory(slash == text.npos ? "." : slash == 0 ? "/" : text.substr(0, slash));
  if (const int above = ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); above >= 0) ::close(above);
  return open(path, flags, 0);
}

int close(int fd) {
  const int64_t result = completed(Call::close, ::close(fd));
  return result == -EINTR ? 0 : static_cast<int>(result);  // Linux has closed it
}

int64_t read(int fd, void* data, size_t size, uint64_t offset) {
  return completed(Call::read, ::pread(fd, data, size, static_cast<off_t>(offset)));
}

int64_t write(int fd, const void* data, size_t size, uint64_t offset) {
  return completed(Call::write, ::pwrite(fd, data, size, static_cast<off_t>(offset)));
}

int allocate(int fd, uint64_t size) {
  return static_cast<int>(
      guarded(Call::allocate, [&] { return ::syscall(SYS_fallocate, fd, 0, off_t{0}, static_cast<off_t>(size)); }));
}

int truncate(int fd, uint64_t size) {
  return static_cast<int>(guarded(Call::truncate, [&] { return ::ftruncate(fd, static_cast<off_t>(size)); }));
}

int sync(int fd) {
  return static_cast<int>(guarded(Call::sync, [&] { return ::fsync(fd); }));
}

int sync_directory(const char* path) {
  return static_cast<int>(guarded(Call::sync_directory, [&]() -> int64_t {
    const int fd = ::open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return -1;
    const int result = ::fsync(fd);
    const int error = errno;
    ::close(fd);
    errno = error;
    // Some network file systems have no such thing as syncing a directory.
    return result != 0 && (error == EINVAL || error == ENOTSUP) ? 0 : result;
  }));
}

int rename(const char* from, const char* to) {
  return with_late_fault(Call::rename, -ENOENT, [&] { return std::rename(from, to); });
}

int unlink(const char* path) {
  return static_cast<int>(guarded(Call::unlink, [&] { return ::unlink(path); }));
}

int link(const char* from, const char* to) {
  return with_late_fault(Call::link, -EEXIST, [&] { return ::link(from, to); });
}

int exchange(const char* first, const char* second) {
  return static_cast<int>(guarded(Call::exchange, [&] {
    constexpr unsigned kExchange = 2;  // RENAME_EXCHANGE, since Linux 3.15
    return ::syscall(SYS_renameat2, AT_FDCWD, first, AT_FDCWD, second, kExchange);
  }));
}

int free_bytes(const char* path, std::optional<uint64_t>& bytes) {
  return static_cast<int>(guarded(Call::space, [&] {
    struct statvfs answer{};
    const int result = ::statvfs(path, &answer);
    bytes.reset();
    if (result == 0 && answer.f_blocks > 1) bytes = uint64_t{answer.f_bavail} * answer.f_frsize;
    return result;
  }));
}

int64_t file_size(int fd) {
  struct stat answer{};
  if (::fstat(fd, &answer) < 0) return -errno;
  return S_ISREG(answer.st_mode) ? static_cast<int64_t>(answer.st_size) : -EINVAL;
}

bool is_in_memory(int fd) {
  struct statfs file_system{};
  return ::fstatfs(fd, &file_system) == 0 && file_system.f_type == TMPFS_MAGIC;
}

DirectRules direct_rules(int fd) {
  if (is_in_memory(fd)) return {};
#ifdef STATX_DIOALIGN
  struct statx answer{};
  if (::statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &answer) == 0 && (answer.stx_mask & STATX_DIOALIGN)) {
    return {answer.stx_dio_mem_align, answer.stx_dio_offset_align};
  }
#else
  (void)fd;
#endif
  return {4096, 4096};  // the kernel does not tell: what every file system that has direct I/O accepts
}

std::optional<uint64_t> resident_bytes(int fd, uint64_t size) {
  struct Range {
    uint64_t offset, length;
  } range{0, size};
  struct Answer {
    uint64_t cached, dirty, writeback, evicted, recently_evicted;
  } answer{};
  constexpr long kCachestat = 451;  // since Linux 6.5, the same on every architecture
  const uint64_t page = page_bytes();
  if (::syscall(kCachestat, fd, &range, &answer, 0) == 0) return std::min(size, answer.cached * page);
  if (size == 0) return 0;
  void* map = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0);
  if (map == MAP_FAILED) return std::nullopt;
  const size_t pages = (size + page - 1) / page;
  std::string state(pages, '\0');
  const int result = ::mincore(map, size, reinterpret_cast<unsigned char*>(state.data()));
  ::munmap(map, size);
  if (result != 0) return std::nullopt;
  const auto cached = static_cast<uint64_t>(std::count_if(state.begin(), state.end(), [](char c) { return c & 1; }));
  return std::min(size, cached * page);
}

uint64_t page_bytes() {
  const uint64_t pretended = pretended_page_bytes.load();
  return pretended != 0 ? pretended : static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
}

void pretend_page_bytes(uint64_t bytes) {
  pretended_page_bytes.store(bytes);
}

int64_t reserve_addresses(uint64_t bytes) {
  return guarded(Call::map, [&]() -> int64_t {
    void* map = ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return map == MAP_FAILED ? -1 : static_cast<int64_t>(reinterpret_cast<uintptr_t>(map));
  });
}

void release_addresses(std::byte* address, uint64_t bytes) {
  ::munmap(address, bytes);
}

int make_writable(std::byte* address, uint64_t bytes) {
  if (begins_inside_a_page(address)) return -EINVAL;
  return static_cast<int>(guarded(Call::protect, [&] { return ::mprotect(address, bytes, PROT_READ | PROT_WRITE); }));
}

int advise(std::byte* address, uint64_t bytes, int advice) {
  if (begins_inside_a_page(address)) return -EINVAL;
  return static_cast<int>(guarded(Call::advise, [&] { return ::madvise(address, bytes, advice); }));
}

int populate(std::byte* address, uint64_t bytes) {
  constexpr int kPopulateWrite = 23;  // since Linux 5.14
  if (begins_inside_a_page(address)) return -EINVAL;
  return static_cast<int>(guarded(Call::populate, [&] { return ::madvise(address, bytes, kPopulateWrite); }));
}

int prefer_node(std::byte* address, uint64_t bytes, std::optional<int> node) {
  constexpr unsigned long kWordBits = 8 * sizeof(unsigned long);
  std::array<unsigned long, 16> nodes{};  // 1024: the most that the kernel can be built for
  if (node && static_cast<unsigned long>(*node) >= nodes.size() * kWordBits) return -EINVAL;
  if (node) nodes[static_cast<size_t>(*node) / kWordBits] = 1UL << (static_cast<size_t>(*node) % kWordBits);
  const int policy = node ? MPOL_PREFERRED : MPOL_DEFAULT;
  const unsigned long bits = nodes.size() * kWordBits + 1;  // the kernel reads one less than it is told of
  return static_cast<int>(or_errno(::syscall(SYS_mbind, address, bytes, policy, nodes.data(), bits, 0)));
}

int64_t peek(std::byte* target, const std::byte* source, uint64_t bytes) {
  const iovec to{target, bytes};
  const iovec from{const_cast<std::byte*>(source), bytes};
  return completed(Call::peek, ::process_vm_readv(::getpid(), &to, 1, &from, 1, 0));
}

int wait_for_change(const uint32_t* word, uint32_t value, double seconds) {
  const auto whole = static_cast<time_t>(seconds);
  const timespec limit{whole, static_cast<long>((seconds - static_cast<double>(whole)) * 1e9)};
  return static_cast<int>(or_errno(::syscall(SYS_futex, word, FUTEX_WAIT, value, &limit, nullptr, 0)));
}

void wake_waiters(const uint32_t* word) {
  ::syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

int lower_priority(int niceness) {
  constexpr int kLowest = 19;
  const auto thread = static_cast<id_t>(::syscall(SYS_gettid));
  errno = 0;  // -1 is a priority, too
  const int now = ::getpriority(PRIO_PROCESS, thread);
  if (now == -1 && errno != 0) return -errno;
  return static_cast<int>(or_errno(::setpriority(PRIO_PROCESS, thread, std::min(kLowest, now + niceness))));
}

void set_exit_status(int status) {
  static std::atomic<int> wanted = 0;
  static std::atomic<pid_t> process = 0;
  process = getpid();
  if (wanted.exchange(status) != 0) return;
#ifdef __GLIBC__
  // glibc allows `exit` within a handler: it runs the remaining handlers, and ends with the new status.
  on_exit(
      [](int old_status, void*) {
        if (old_status == 0 && wanted != 0 && process == getpid()) std::exit(wanted);
      },
      nullptr);
#endif
}

void inject_fault(Call call, int error, uint64_t skip, uint64_t times) {
  const std::lock_guard lock(fault_mutex);
  faults[static_cast<size_t>(call)] = {true, error, skip, times};
  any_fault.store(true);
}

void clear_faults() {
  const std::lock_guard lock(fault_mutex);
  any_fault.store(false);
  faults.fill({});
  seen.fill(0);
}

uint64_t calls_seen(Call call) {
  const std::lock_guard lock(fault_mutex);
  return seen[static_cast<size_t>(call)];
}

std::optional<Call> call_named(const std::string& name) {
  constexpr std::array<const char*, kCalls> kNames = {
      "open",  "read", "write",   "allocate", "truncate", "sync", "sync_directory", "rename",   "unlink",
      "space", "map",  "protect", "advise",   "populate", "peek", "link",           "exchange", "close"};
  const auto found = std::find(kNames.begin(), kNames.end(), name);
  if (found == kNames.end()) return std::nullopt;
  return static_cast<Call>(found - kNames.begin());
}

}  // namespace vescale_ckpt::system
