#include "stage/snapshot_arena.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <limits>
#include <map>
#include <memory>
#include <system_error>

#include "base/memory.h"
#include "base/system.h"
#include "base/workers.h"

namespace vescale_ckpt::stage {
namespace {

constexpr uint64_t kNoBudget = std::numeric_limits<uint64_t>::max();

// So much is touched before it is offered to the registrar, while the next part is touched: enough for all threads.
constexpr uint64_t kTouchStep = 4 * kPinPiece;

// Returns false if the system has no memory. Pages keep their content.
bool take_pages(std::byte* address, uint64_t bytes) {
  const int result = system::populate(address, bytes);
  if (result != -EINVAL) return result == 0;
  for (uint64_t at = 0; at < bytes; at += system::page_bytes()) {
    volatile std::byte& first = address[at];
    first = first;
  }
  return true;
}

}  // namespace

SnapshotRange::~SnapshotRange() {
  if (arena_ != nullptr) arena_->release(data_, bytes_);
}

bool SnapshotRange::wait_until_usable(const std::byte* at, std::chrono::milliseconds timeout) const {
  return arena_->wait_until_usable(at, timeout);
}

SnapshotArena::~SnapshotArena() {
  set_registrar({});
  trim();
  if (base_ != nullptr) system::release_addresses(base_, pieces_.size() * kPinPiece);
}

std::byte* SnapshotArena::address(const Piece& piece) const {
  return address(static_cast<size_t>(&piece - pieces_.data()));
}

// Addresses cost nothing. They are several times the machine's memory, so that ranges in use cannot fragment them.
bool SnapshotArena::reserve() {
  if (base_ != nullptr) return true;
  const auto physical = static_cast<uint64_t>(::sysconf(_SC_PHYS_PAGES)) * system::page_bytes();
  for (uint64_t bytes = align_up(4 * physical, kPinPiece); bytes >= kPinPiece;
       bytes = align_down(bytes / 2, kPinPiece)) {
    const int64_t result = system::reserve_addresses(bytes + kPinPiece);
    if (result < 0) continue;  // there is a limit on addresses: tries fewer
    const auto start = static_cast<uintptr_t>(result);
    const uintptr_t aligned = align_up(start, kPinPiece);
    if (aligned != start) system::release_addresses(reinterpret_cast<std::byte*>(start), aligned - start);
    base_ = reinterpret_cast<std::byte*>(aligned);
    if (const uint64_t behind = start + kPinPiece - aligned; behind != 0) {
      system::release_addresses(base_ + bytes, behind);
    }
    system::advise(base_, bytes, MADV_HUGEPAGE);
    system::advise(base_, bytes, MADV_DONTFORK);  // child processes do not need the snapshots
    if (node_) system::prefer_node(base_, bytes, node_);
    const std::lock_guard lock(mutex_);
    pieces_.resize(bytes / kPinPiece);
    return true;
  }
  return false;
}

// Returns the first free run that is long enough, because its memory was probably touched before; otherwise the
// longest.
SnapshotArena::Run SnapshotArena::find_locked(uint64_t bytes) const {
  const size_t count = align_up(bytes, kPinPiece) / kPinPiece;
  size_t first = 0, length = 0, best = 0, longest = 0;
  for (size_t piece = 0; piece < pieces_.size() && longest < count; ++piece) {
    if (pieces_[piece].in_use != 0) {
      length = 0;
      continue;
    }
    if (length == 0) first = piece;
    if (++length > longest) {
      longest = length;
      best = first;
    }
  }
  return {best, std::min(bytes, longest * kPinPiece)};
}

// Removes a piece's registration. Call it before its pages change, and while no device uses it.
void SnapshotArena::withdraw(std::unique_lock<std::mutex>& lock, Piece& piece) {
  registered_.wait(lock, [&] { return !piece.offering; });
  if (piece.registered) registrar_.remove(address(piece), piece.offered);
  piece.registered = false;
  piece.offered = 0;
}

void SnapshotArena::shrink(std::unique_lock<std::mutex>& lock, Piece& piece, uint64_t keep) {
  if (piece.touched <= keep) return;
  const bool refused = !piece.registered && piece.answered();
  withdraw(lock, piece);
  if (system::advise(address(piece) + keep, piece.touched - keep, MADV_DONTNEED) < 0)
    return;  // locked memory stays with the arena
  touched_ -= piece.touched - keep;
  piece.touched = keep;
  if (refused) piece.offered = keep;  // a device may be copying to the rest, so it must not be registered now
}

// Returns how many bytes from the run's start may be written.
uint64_t SnapshotArena::make_writable(Run run) const {
  for (uint64_t start = 0; start < run.bytes; start += kPinPiece) {
    const size_t index = run.first + start / kPinPiece;
    if (pieces_[index].touched == 0 && system::make_writable(address(index), kPinPiece) < 0) return start;
  }
  return run.bytes;
}

// Touches the missing pages of a run. Returns for how many bytes from its start there is memory.
uint64_t SnapshotArena::touch(Run run, unsigned threads) {
  constexpr uint64_t kPart = 16 << 20;
  struct Part {
    uint64_t begin, end;  // bytes in the run
  };
  std::vector<Part> parts;
  std::atomic<uint64_t> touched{run.bytes};
  for (uint64_t start = 0; start < run.bytes; start += kPinPiece) {
    const size_t index = run.first + start / kPinPiece;
    const uint64_t have = pieces_[index].touched, want = std::min(kPinPiece, run.bytes - start);
    for (uint64_t begin = have; begin < want; begin += kPart) {
      parts.push_back({start + begin, start + std::min(want, begin + kPart)});
    }
  }
  std::byte* const data = address(run.first);
  const auto take = [&](size_t index) {
    const auto [begin, end] = parts[index];
    uint64_t limit = touched.load(std::memory_order_relaxed);
    if (begin >= limit || take_pages(data + begin, end - begin)) return;
    while (begin < limit && !touched.compare_exchange_weak(limit, begin)) {
    }
  };
  parallel_for(threads, parts.size(), 1, [&] { return take; });
  return align_down(touched, kGranule);
}

// Touches a run, and has it registered. Returns for how many bytes from its start there is memory.
//
// Each step is registered while the next one is touched. All memory is touched before the first copy, because the copy
// must know how much there is. That costs nothing: copies are several times as fast as registration, so they wait for
// it and end with it. With several threads, touching is as fast as registration.
uint64_t SnapshotArena::touch_and_offer(Run run, unsigned threads) {
  const uint64_t writable =
      make_writable(run);  // for the whole run at once: each call would wait for a running registration
  uint64_t taken = 0;
  for (bool all = true; all && taken < writable;) {
    const Run step{run.first + taken / kPinPiece, std::min(kTouchStep, writable - taken)};
    const uint64_t touched = touch(step, threads);
    all = touched == step.bytes;
    {
      std::unique_lock lock(mutex_);
      for (uint64_t start = 0; start < step.bytes; start += kPinPiece) {
        Piece& piece = pieces_[step.first + start / kPinPiece];
        const uint64_t want = std::min(kPinPiece, step.bytes - start);
        if (want <= piece.touched) continue;
        withdraw(lock, piece);
        touched_ += want - piece.touched;
        piece.touched = want;
      }
      taken += touched;
      // The system had less memory. Memory that was touched behind the gap is of no use.
      for (uint64_t start = align_down(taken, kPinPiece); !all && start < run.bytes; start += kPinPiece) {
        shrink(lock, pieces_[run.first + start / kPinPiece], taken > start ? taken - start : 0);
      }
    }
    offer();
  }
  return taken;
}

SnapshotArena::Piece* SnapshotArena::find_unoffered_locked() {
  uint64_t seen = 0;
  for (size_t index = 0; seen < touched_; ++index) {  // behind the touched memory there are only addresses
    if (pieces_[index].offered != pieces_[index].touched) return &pieces_[index];
    seen += pieces_[index].touched;
  }
  return nullptr;
}

// Starts the registration of all unregistered memory. growing_ must be held.
void SnapshotArena::offer() {
  if (!registrar_.add) return;
  {
    const std::lock_guard lock(mutex_);
    if (registering_ || find_unoffered_locked() == nullptr) return;
    registering_ = true;
  }
  try {
    registering_thread_ = std::jthread([this](const std::stop_token& stop) { register_all(stop); });
  } catch (const std::system_error&) {  // no thread could be started: copies are slower, but correct
    const std::lock_guard lock(mutex_);
    registering_ = false;
    registered_.notify_all();  // another thread may wait in prepare()
  }
}

void SnapshotArena::register_all(const std::stop_token& stop) {
  std::unique_lock lock(mutex_);
  for (Piece* piece = nullptr; !stop.stop_requested() && (piece = find_unoffered_locked()) != nullptr;) {
    piece->offered = piece->touched;
    piece->offering = true;
    lock.unlock();
    const bool added = registrar_.add(address(*piece), piece->offered);
    lock.lock();
    piece->registered = added;
    piece->offering = false;
    registered_.notify_all();
  }
  registering_ = false;
  registered_.notify_all();
}

// Finds a run within the budget and touches it. growing_ must be held.
SnapshotArena::Run SnapshotArena::grow(uint64_t bytes, uint64_t budget_bytes, unsigned threads) {
  if (bytes == 0 || !reserve()) return {};
  Run run;
  {
    std::unique_lock lock(mutex_);
    const uint64_t room = budget_bytes > in_use_ ? align_down(budget_bytes - in_use_, kGranule) : 0;
    run = find_locked(align_up(std::min(bytes, room), kGranule));
    uint64_t fresh = 0;
    for (uint64_t start = 0; start < run.bytes; start += kPinPiece) {
      const uint64_t have = pieces_[run.first + start / kPinPiece].touched;
      fresh += std::max(have, std::min(kPinPiece, run.bytes - start)) - have;
    }
    // Touched memory that this run does not use must not exceed the budget. It is given back from the end, where it
    // would stay unused longest.
    const size_t behind = run.first + align_up(run.bytes, kPinPiece) / kPinPiece;
    for (size_t index = pieces_.size(); index-- > 0 && touched_ + fresh > budget_bytes;) {
      if (index >= run.first && index < behind) continue;
      Piece& piece = pieces_[index];
      if (piece.in_use == 0 || !(piece.registered || piece.offering)) shrink(lock, piece, piece.in_use);
    }
  }
  run.bytes = touch_and_offer(run, threads);
  return run;
}

SnapshotRange SnapshotArena::acquire(uint64_t bytes, uint64_t budget_bytes, unsigned threads) {
  const std::lock_guard growing(growing_);
  const Run run = grow(bytes, budget_bytes, threads);
  SnapshotRange range;
  if (run.bytes == 0) return range;
  const std::lock_guard lock(mutex_);
  for (uint64_t start = 0; start < run.bytes; start += kPinPiece) {
    pieces_[run.first + start / kPinPiece].in_use = std::min(kPinPiece, run.bytes - start);
  }
  in_use_ += run.bytes;
  range.arena_ = this;
  range.data_ = address(run.first);
  range.bytes_ = run.bytes;
  return range;
}

uint64_t SnapshotArena::prepare(uint64_t bytes, unsigned threads) {
  uint64_t prepared = 0;
  {
    const std::lock_guard growing(growing_);
    prepared = grow(bytes, kNoBudget, threads).bytes;
    offer();
  }
  std::unique_lock lock(mutex_);
  registered_.wait(lock, [&] { return !registering_; });
  return prepared;
}

bool SnapshotArena::wait_until_usable(const std::byte* at, std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  const Piece& piece = pieces_[static_cast<uint64_t>(at - base_) / kPinPiece];
  return registered_.wait_for(lock, timeout, [&] { return !registering_ || piece.answered(); });
}

void SnapshotArena::release(std::byte* data, uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  const size_t first = static_cast<uint64_t>(data - base_) / kPinPiece;
  for (uint64_t start = 0; start < bytes; start += kPinPiece) pieces_[first + start / kPinPiece].in_use = 0;
  in_use_ -= bytes;
}

void SnapshotArena::trim() {
  const std::lock_guard growing(growing_);
  std::unique_lock lock(mutex_);
  for (Piece& piece : pieces_) {
    if (piece.in_use == 0) shrink(lock, piece, 0);
  }
}

void SnapshotArena::set_registrar(MemoryRegistrar registrar) {
  const std::lock_guard growing(growing_);
  registering_thread_ = {};
  std::unique_lock lock(mutex_);
  for (Piece& piece : pieces_) withdraw(lock, piece);
  registrar_ = std::move(registrar);
}

void SnapshotArena::prefer_node(std::optional<int> node) {
  const std::lock_guard growing(growing_);
  if (node == node_) return;
  node_ = node;
  if (base_ != nullptr) system::prefer_node(base_, pieces_.size() * kPinPiece, node);
}

SnapshotMemory SnapshotArena::memory() const {
  const std::lock_guard lock(mutex_);
  SnapshotMemory memory{pieces_.size() * kPinPiece, touched_, in_use_, 0};
  for (const Piece& piece : pieces_) memory.registered += piece.registered ? piece.offered : 0;
  return memory;
}

SnapshotArena& snapshot_arena() {
  static std::mutex mutex;
  // Leaked on purpose: background threads may hold ranges while static destructors run.
  static auto& arenas = *new std::map<pid_t, std::unique_ptr<SnapshotArena>>();
  const std::lock_guard lock(mutex);
  auto& arena = arenas[::getpid()];
  if (!arena) arena = std::make_unique<SnapshotArena>();
  return *arena;
}

}  // namespace vescale_ckpt::stage
