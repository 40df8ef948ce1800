// Memory for snapshots: one range of addresses, whose pages are kept from save to save. The first touch of a page takes
// several times as long as the copy into it.
//
// Ranges of it are handed out under a budget; a request above the budget gets less memory, never an error. Memory lies
// in pieces of kPinPiece, which may be registered with a device. Thread-safe.
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

// What is registered with a device at once. No registration crosses a multiple of it, in addresses.
inline constexpr uint64_t kPinPiece = 64 << 20;

// How a device learns of memory. Called from any thread, never for the same memory at once, and never to call the arena
// back.
struct MemoryRegistrar {
  std::function<bool(std::byte* address, uint64_t bytes)> add;  // false: refused, the memory is used as it is
  std::function<void(std::byte* address, uint64_t bytes)> remove;
};

struct SnapshotMemory {
  uint64_t reserved = 0;    // addresses
  uint64_t touched = 0;     // memory taken from the system
  uint64_t in_use = 0;      // in ranges that are out
  uint64_t registered = 0;  // with a device
};

class SnapshotArena;

// A range of touched memory, given back on destruction. It starts at a multiple of kPinPiece. Its content is undefined.
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
  // True once a device may copy to the piece that holds `at`: it is registered, or was refused, or nothing registers
  // it. False after `timeout`.
  bool wait_until_usable(const std::byte* at, std::chrono::milliseconds timeout) const;

 private:
  friend class SnapshotArena;
  SnapshotArena* arena_ = nullptr;
  std::byte* data_ = nullptr;
  uint64_t bytes_ = 0;
};

class SnapshotArena {
 public:
  static constexpr uint64_t kGranule = 2 << 20;  // bytes that are taken and counted at once: a huge page

  SnapshotArena() = default;
  ~SnapshotArena();  // no range may be out
  SnapshotArena(const SnapshotArena&) = delete;
  SnapshotArena& operator=(const SnapshotArena&) = delete;

  // `bytes`, or as much as can be had: all ranges that are out stay within the budget, and so does all memory touched
  // (but for the ends of registered pieces in use, which a device may be at work on). Both count whole granules.
  // Touches what was not yet, on so many threads; what is touched is registered meanwhile, in the background.
  SnapshotRange acquire(uint64_t bytes, uint64_t budget_bytes, unsigned threads);
  // Touches what the next range of so many bytes will need, and waits until all is registered. Returns the bytes that
  // it would get.
  uint64_t prepare(uint64_t bytes, unsigned threads);
  // Gives memory that is not in use back to the system.
  void trim();
  // From now on all touched memory is registered, in the background, the lowest addresses first; what the registrar
  // before registered is removed. Must not be called while a device uses the memory.
  void set_registrar(MemoryRegistrar registrar);
  // Memory that is touched from now on lies on this node, where that has some left; nullopt: on any. Without effect
  // where the system refuses it.
  void prefer_node(std::optional<int> node);
  SnapshotMemory memory() const;

 private:
  friend class SnapshotRange;
  struct Piece {
    uint64_t touched = 0;  // bytes, from its start
    uint64_t offered = 0;  // bytes that the registrar was last asked to add
    bool registered = false;
    bool offering = false;  // the registrar is at it: neither its registration nor its pages may change
    uint64_t in_use = 0;    // bytes, from its start: of one range
    // The registrar has answered for all that is touched.
    bool answered() const { return offered == touched && !offering; }
  };
  struct Run {
    size_t first = 0;    // piece
    uint64_t bytes = 0;  // from its start
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

  std::mutex growing_;         // one grows or trims at a time; taken before mutex_
  std::byte* base_ = nullptr;  // set once, by growing_'s holder
  std::optional<int> node_;    // guarded by growing_
  MemoryRegistrar registrar_;  // guarded by growing_, whose holder joins the thread that uses it before a change
  mutable std::mutex mutex_;   // guards what follows, for short
  std::vector<Piece> pieces_;
  uint64_t in_use_ = 0;
  uint64_t touched_ = 0;
  bool registering_ = false;  // the thread is at it, and looks for more before it ends
  std::condition_variable registered_;
  std::jthread registering_thread_;  // guarded by growing_
};

// The arena of this process, never freed, safe after fork: the child gets its own, an empty one.
SnapshotArena& snapshot_arena();

}  // namespace vescale_ckpt::stage
