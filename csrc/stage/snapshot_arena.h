// Gives out memory for snapshots from one range of addresses, whose pages are kept from save to save. The first touch
// of a page takes several times as long as the copy into it.
//
// A budget limits the memory in use. A request above the budget gets less memory, never an error. Memory is divided
// into pieces of kPinPiece, which may be registered with a device. Thread-safe.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <stop_token>
#include <thread>
#include <utility>
#include <vector>

namespace vescale_ckpt::stage {

// So much is registered with a device at once. No registration crosses an address that is a multiple of it.
inline constexpr uint64_t kPinPiece = 64 << 20;

// Registers memory with a device. Any thread calls it, but never two for the same memory. It must not call the arena.
struct MemoryRegistrar {
  std::function<bool(std::byte* address, uint64_t bytes)> add;  // false: refused; the memory is used without it
  std::function<void(std::byte* address, uint64_t bytes)> remove;
};

struct SnapshotMemory {
  uint64_t reserved = 0;    // addresses
  uint64_t touched = 0;     // memory taken from the system
  uint64_t in_use = 0;      // memory of ranges in use
  uint64_t registered = 0;  // memory registered with a device
};

class SnapshotArena;

// A range of touched memory, which is given back on destruction. It starts at a multiple of kPinPiece. Its content is
// undefined.
class SnapshotRange {
 public:
  SnapshotRange() = default;
  SnapshotRange(SnapshotRange&& other) noexcept { *this = std::move(other); }
  SnapshotRange& operator=(SnapshotRange&& other) noexcept {
    std::swap(arena_, other.arena_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~SnapshotRange();
  std::byte* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }
  // Returns true when a device may copy to the piece that holds `at`: it is registered, or was refused, or there is no
  // registrar. Returns false after `timeout`.
  bool wait_until_usable(const std::byte* at, std::chrono::milliseconds timeout) const;

 private:
  friend class SnapshotArena;
  SnapshotArena* arena_ = nullptr;
  std::byte* data_ = nullptr;
  uint64_t bytes_ = 0;
};

class SnapshotArena {
 public:
  static constexpr uint64_t kGranule = 2 << 20;  // memory is taken and counted in such units: huge pages

  SnapshotArena() = default;
  ~SnapshotArena();  // no range may be in use
  SnapshotArena(const SnapshotArena&) = delete;
  SnapshotArena& operator=(const SnapshotArena&) = delete;

  // Returns a range of `bytes`, or of as much as possible. The sum of ranges in use stays within the budget, and so
  // does all touched memory, except the ends of registered pieces in use, which a device may use. Both are counted in
  // whole granules. Touches new memory on so many threads, and registers it in the background meanwhile.
  SnapshotRange acquire(uint64_t bytes, uint64_t budget_bytes, unsigned threads);
  // Touches the memory for the next range of so many bytes, and waits until all is registered. Returns the bytes that
  // the range would get.
  uint64_t prepare(uint64_t bytes, unsigned threads);
  // Gives memory that is not in use back to the system.
  void trim();
  // Registers all touched memory from now on, in the background, the lowest addresses first. Removes the registrations
  // of the old registrar. Must not be called while a device uses the memory.
  void set_registrar(MemoryRegistrar registrar);
  // Takes memory on this node from now on, as long as it has free memory; nullopt: on any node. Has no effect if the
  // system refuses.
  void prefer_node(std::optional<int> node);
  SnapshotMemory memory() const;

 private:
  friend class SnapshotRange;
  struct Piece {
    uint64_t touched = 0;  // bytes from its start
    uint64_t offered = 0;  // bytes in the last call of the registrar's `add`
    bool registered = false;
    bool offering = false;  // the registrar is working: neither registration nor pages may change
    uint64_t in_use = 0;    // bytes from its start, which one range uses
    // Whether the registrar has answered for all touched memory.
    bool answered() const { return offered == touched && !offering; }
  };
  struct Run {
    size_t first = 0;    // index of the first piece
    uint64_t bytes = 0;  // bytes from the start of that piece
  };

  Run grow(uint64_t bytes, uint64_t budget_bytes, unsigned threads);
  bool reserve();
  Run find_locked(uint64_t bytes) const;
  uint64_t make_writable(Run run) const;
  uint64_t touch(Run run, unsigned threads);
  uint64_t touch_and_offer(Run run, unsigned threads);
  void offer();
  void register_all(const std::stop_token& stop);
  Piece* find_unoffered_locked();
  void withdraw(std::unique_lock<std::mutex>& lock, Piece& piece);
  void shrink(std::unique_lock<std::mutex>& lock, Piece& piece, uint64_t keep);
  bool wait_until_usable(const std::byte* at, std::chrono::milliseconds timeout);
  void release(std::byte* data, uint64_t bytes);
  std::byte* address(const Piece& piece) const;
  std::byte* address(size_t piece) const { return base_ + piece * kPinPiece; }

  std::mutex growing_;         // held to grow or trim; locked before mutex_
  std::byte* base_ = nullptr;  // set once, under growing_
  std::optional<int> node_;    // guarded by growing_
  MemoryRegistrar registrar_;  // guarded by growing_; the thread that uses it is joined before a change
  mutable std::mutex mutex_;   // guards the members below; held only for a short time
  std::vector<Piece> pieces_;
  uint64_t in_use_ = 0;
  uint64_t touched_ = 0;
  bool registering_ = false;  // the thread runs, and looks for more memory before it ends
  std::condition_variable registered_;
  std::jthread registering_thread_;  // guarded by growing_
};

// Returns the arena of this process, which is never freed. After a fork, the child gets a new, empty one.
SnapshotArena& snapshot_arena();

}  // namespace vescale_ckpt::stage
