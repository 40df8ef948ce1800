#include "stage/snapshot.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "base/error.h"
#include "base/system.h"
#include "base/workers.h"
#include "io/table_cursor.h"
#include "stage/snapshot_layout.h"
#include "write/writer.h"

namespace vescale_ckpt::stage {
namespace {

#if defined(__SSE2__)

// Copies like memcpy, but past the processor's caches: a snapshot is not read before it is written to disk, so in the
// cache it would only replace the trainer's data. Target lines are not fetched before they are overwritten, which saves
// a third of the memory traffic. Call finish_stream_copies() before another thread uses the bytes. `next`: the source
// of the next copy, which is prefetched; null: unknown. It may be any address.
//
// Uses SSE2, which every x86-64 has. Wider registers were not faster, because memory is the limit.
void stream_copy(std::byte* target, const std::byte* source, uint64_t bytes, const std::byte* next = nullptr) {
  constexpr uint64_t kLine = 64;
  constexpr uint64_t kAhead = 1024;  // the processor's own prefetching ends at each page, and starts late in the next
  constexpr uint64_t kLeast = 512;   // in smaller copies, the ends that are copied as usual are too large a part
  if (bytes < kLeast) {
    if (bytes != 0) std::memcpy(target, source, bytes);
    return;
  }
  const uint64_t head = (kLine - reinterpret_cast<uintptr_t>(target) % kLine) % kLine;
  std::memcpy(target, source, head);
  const uint64_t own = bytes > kAhead ? bytes - kAhead : 0;  // lines before it can prefetch from the source itself
  if (next == nullptr) next = source;
  uint64_t at = head;
  for (; at + kLine <= bytes; at += kLine) {
    __builtin_prefetch(at < own ? source + at + kAhead : next + (at - own));
    __m128i words[4];
    std::memcpy(words, source + at, kLine);
    auto* to = reinterpret_cast<__m128i*>(target + at);
    for (int i = 0; i < 4; ++i) _mm_stream_si128(to + i, words[i]);
  }
  std::memcpy(target + at, source + at, bytes - at);
}

// Orders all copies of this thread before its later writes. One call is enough for many copies.
void finish_stream_copies() {
  _mm_sfence();  // without it, such stores may come after the release of a lock
}

#else

void stream_copy(std::byte* target, const std::byte* source, uint64_t bytes, const std::byte* = nullptr) {
  if (bytes != 0) std::memcpy(target, source, bytes);
}

void finish_stream_copies() {}

#endif

}  // namespace

class Snapshot::Copy {
 public:
  Copy(std::span<const int64_t> table, uint64_t budget_bytes, unsigned threads, SnapshotArena& arena,
       const SnapshotDevices& devices)
      : table_(table.begin(), table.end()),
        sources_(write::parse_write_table(table)),
        pipelines_(devices.pipelines),
        producers_(devices.producers) {
    layout_ = lay_out_snapshot(sources_, budget_bytes);
    range_ = arena.acquire(layout_.memory_bytes, budget_bytes, threads);
    if (range_.bytes() < layout_.memory_bytes) layout_ = lay_out_snapshot(sources_, range_.bytes());
    if (!devices.of_rows.empty()) part_by_devices(devices.of_rows);
    cut();
  }

  ~Copy() { cancelled = true; }  // the thread is joined before the members that it uses are destroyed

  const SnapshotLayout& layout() const { return layout_; }
  std::span<std::byte> memory() const { return {range_.data(), range_.bytes()}; }

  void begin() {
    const std::lock_guard lock(mutex_);
    if (state_ != State::idle) throw Error::invalid("a snapshot is copied once");
    state_ = State::running;
  }

  void run(unsigned threads) {
    attempt([&] { start_devices(true); });
    attempt([&] { copy_from_host(threads); });
    end();
  }

  // Copies of devices start on this thread, directly behind the queued work; if other snapshots use the pipelines, they
  // start in the background. Strided rows of host memory are also copied on this thread: only contiguous memory can be
  // read safely if it may be unmapped at any time.
  void run_in_background(unsigned threads) {
    attempt([&] { start_devices(false); });
    attempt([&] { copy_strided(threads); });
    may_go_ = true;
    cut();
    try {
      background_ = std::jthread([this, threads] { run(threads); });
    } catch (...) {  // no thread could be started
      keep(std::current_exception());
      end();
    }
  }

  void wait() {
    std::unique_lock lock(mutex_);
    if (state_ == State::idle) throw Error::invalid("the copy of this snapshot was not started");
    finished_.wait(lock, [&] { return state_ == State::done; });
    if (error_) std::rethrow_exception(error_);
  }

  std::vector<int64_t> table() const {
    {
      const std::lock_guard lock(mutex_);
      if (state_ != State::done || error_) throw Error::invalid("the snapshot is not copied");
    }
    std::vector<int64_t> rows;
    rows.reserve(table_.size());
    size_t at = 0;
    for (size_t row = 0; row < sources_.size(); ++row) {
      const auto dims = static_cast<size_t>(table_[at + 2]);
      if (row >= layout_.first) append_row(rows, std::span(table_).subspan(at, 3 + dims), row);
      at += 3 + 2 * dims;
    }
    return rows;
  }

  std::atomic<bool> cancelled = false;

 private:
  enum class State { idle, running, done };

  // The beginning of a piece of work. It ends at the beginning of the next one.
  struct Cut {
    size_t copy;
    uint64_t begin;  // byte in the copy
  };

  // Pieces are small enough that all threads end together, and large enough that the cursor costs nothing.
  void cut() {
    cuts_.clear();
    constexpr uint64_t kPiece = 4 << 20;
    constexpr uint64_t kPerCopy = 256;  // the overhead of one copy equals that of so many bytes
    uint64_t full = kPiece;
    for (size_t copy = 0; copy < layout_.copies.size(); ++copy) {
      for (uint64_t begin = 0; begin < layout_.copies[copy].bytes;) {
        if (full >= kPiece) {
          cuts_.push_back({copy, begin});
          full = 0;
        }
        const uint64_t bytes = std::min(layout_.copies[copy].bytes - begin, kPiece - full);
        begin += bytes;
        full += bytes + kPerCopy;
      }
    }
    cuts_.push_back({layout_.copies.size(), 0});
  }

  void copy_strided(unsigned threads) {
    const auto contiguous =
        std::ranges::stable_partition(layout_.copies, [](const SnapshotCopy& copy) { return copy.strided != nullptr; });
    std::vector<SnapshotCopy> rest(contiguous.begin(), contiguous.end());
    layout_.copies.erase(contiguous.begin(), contiguous.end());
    cut();
    copy_from_host(threads);
    layout_.copies = std::move(rest);
  }

  // Moves the rows on devices out of the layout, which keeps the copies of host memory.
  void part_by_devices(std::span<const int64_t> of_rows) {
    if (of_rows.size() != sources_.size()) throw Error::invalid("expected a device for each row of the table");
    std::vector<std::span<const int64_t>> rows;
    for (size_t at = 0; at < table_.size(); at += rows.back().size()) {
      rows.push_back(std::span(table_).subspan(at, 3 + 2 * static_cast<size_t>(table_[at + 2])));
    }
    std::vector<SnapshotCopy> of_host;
    for (const SnapshotCopy& copy : layout_.copies) {
      if (of_rows[copy.row] < 0) {
        of_host.push_back(copy);
      } else {
        if (pipelines_ == nullptr) throw Error::invalid("rows on a device, but no pipelines to copy them");
        device_rows_[static_cast<int>(of_rows[copy.row])].push_back(device_row(copy, rows[copy.row]));
      }
    }
    layout_.copies = std::move(of_host);
  }

  device::DeviceRow device_row(const SnapshotCopy& copy, std::span<const int64_t> row) const {
    const auto address = static_cast<device::DeviceAddress>(reinterpret_cast<uintptr_t>(copy.source));
    std::byte* const target = range_.data() + copy.offset;
    if (copy.strided == nullptr) {
      const int64_t bytes = static_cast<int64_t>(copy.bytes), stride = 1;
      return {address, target, 1, {&bytes, 1}, {&stride, 1}};
    }
    const size_t dims = row.size() / 2 - 1;
    const uint32_t item_bytes = format::dtypes()[static_cast<size_t>(row[0])].item_bytes;
    return {address, target, item_bytes, row.subspan(3, dims), row.last(dims)};
  }

  // Starts the copies of devices once. Waits for the pipelines if they are in use; without `wait_for_pipelines` it
  // starts nothing then.
  void start_devices(bool wait_for_pipelines) {
    if (device_rows_.empty() || lease_) return;
    std::vector<int> devices;
    for (const auto& [device, rows] : device_rows_) devices.push_back(device);
    if (wait_for_pipelines) {
      lease_.emplace(pipelines_->borrow(devices));
    } else if (auto lease = pipelines_->try_borrow(devices)) {
      lease_.emplace(std::move(*lease));
    } else {
      return;
    }
    const device::HostLayout layout{
        .base = reinterpret_cast<uintptr_t>(range_.data()),
        .piece_bytes = kPinPiece,
        .alignment = SnapshotLayout::kAlignment,
        .wait_until_usable = [this](const std::byte* at, std::chrono::milliseconds timeout) {
          return range_.wait_until_usable(at, timeout);
        }};
    for (auto& [device, rows] : device_rows_) {
      std::vector<device::StreamHandle> streams;
      for (const Producer& producer : producers_) {
        if (producer.device == device) streams.push_back(producer.stream);
      }
      device::Pipeline& pipeline = lease_->pipeline(device);
      pipeline.start(std::move(rows), streams, layout, &cancelled);
      started_.push_back(&pipeline);
    }
  }

  // Returns when nothing touches the rows on devices any more. Throws the first error, which cancels the other devices.
  void finish_devices() {
    std::exception_ptr first;
    for (device::Pipeline* pipeline : started_) {
      try {
        while (!pipeline->wait(std::chrono::hours(1))) {
        }
      } catch (...) {
        if (!first) first = std::current_exception();
        cancelled = true;
      }
    }
    started_.clear();
    lease_.reset();
    if (first) std::rethrow_exception(first);
  }

  void copy_from_host(unsigned threads) {
    const auto copy = [this](size_t piece) {
      if (cancelled) throw Error(Error::Kind::cancelled, "the snapshot was cancelled");
      copy_piece(cuts_[piece], cuts_[piece + 1]);
    };
    parallel_for(threads, cuts_.size() - 1, 1, [&] { return copy; });
  }

  void copy_piece(const Cut& from, const Cut& to) {
    for (size_t index = from.copy; index <= to.copy && index < layout_.copies.size(); ++index) {
      const SnapshotCopy& copy = layout_.copies[index];
      const uint64_t begin = index == from.copy ? from.begin : 0;
      const uint64_t end = index == to.copy ? to.begin : copy.bytes;
      std::byte* const target = range_.data() + copy.offset + begin;
      if (copy.strided != nullptr) {
        copy.strided->gather(target, begin, end, copy.source);
      } else if (may_go_) {
        copy_or_throw(target, copy.source + begin, end - begin, copy.row);
      } else {
        const bool last = index + 1 == layout_.copies.size();
        stream_copy(target, copy.source + begin, end - begin, last ? nullptr : layout_.copies[index + 1].source);
      }
    }
    finish_stream_copies();
  }

  // Copies memory that training may unmap meanwhile, although it must not: a plain read would end the process.
  void copy_or_throw(std::byte* target, const std::byte* source, uint64_t bytes, size_t row) {
    for (uint64_t done = 0; done < bytes;) {
      const int64_t copied = cannot_peek_ ? -ENOSYS : system::peek(target + done, source + done, bytes - done);
      if (copied > 0) {
        done += static_cast<uint64_t>(copied);
      } else if (copied == -ENOSYS || copied == -EPERM) {
        cannot_peek_ = true;
        return stream_copy(target + done, source + done, bytes - done);
      } else {
        throw Error(Error::Kind::io, "its memory was given back while it was copied", {}, 0, EFAULT,
                    static_cast<int64_t>(row));
      }
    }
  }

  template <typename Step>
  void attempt(const Step& step) {
    try {
      step();
    } catch (...) {
      keep(std::current_exception());
    }
  }

  // Keeps the first error, and cancels the rest.
  void keep(std::exception_ptr error) {
    if (!failure_) failure_ = std::move(error);
    cancelled = true;
  }

  void end() {
    attempt([&] { finish_devices(); });
    {
      const std::lock_guard lock(mutex_);
      error_ = failure_;
      state_ = State::done;
    }
    finished_.notify_all();
  }

  void append_row(std::vector<int64_t>& rows, std::span<const int64_t> row, size_t index) const {
    const uint64_t offset = layout_.offsets[index - layout_.first];
    const std::byte* address = offset == SnapshotLayout::kNowhere ? nullptr : range_.data() + offset;
    rows.insert(rows.end(), row.begin(), row.end());
    rows[rows.size() - row.size()] |= int64_t{io::kUnchanging};
    rows[rows.size() - row.size() + 1] = static_cast<int64_t>(reinterpret_cast<uintptr_t>(address));
    const std::vector<int64_t> strides = format::contiguous_strides(row.subspan(3));
    rows.insert(rows.end(), strides.begin(), strides.end());
  }

  const std::vector<int64_t> table_;
  const std::vector<write::RecordSource> sources_;
  SnapshotRange range_;
  SnapshotLayout layout_;
  DevicePipelines* const pipelines_;
  const std::vector<Producer> producers_;
  std::map<int, std::vector<device::DeviceRow>> device_rows_;
  std::optional<DevicePipelines::Lease> lease_;
  std::vector<device::Pipeline*> started_;
  std::vector<Cut> cuts_;
  bool may_go_ = false;  // whether the sources may be unmapped during the copy
  std::atomic<bool> cannot_peek_ = false;
  std::exception_ptr failure_;  // error of the background thread
  mutable std::mutex mutex_;    // guards the next three
  std::condition_variable finished_;
  State state_ = State::idle;
  std::exception_ptr error_;
  std::jthread background_;  // declared last: it is joined before all other members are destroyed
};

Snapshot::Snapshot(std::span<const int64_t> table, uint64_t budget_bytes, unsigned threads, SnapshotArena& arena,
                   const SnapshotDevices& devices)
    : process_(::getpid()), copy_(std::make_unique<Copy>(table, budget_bytes, threads, arena, devices)) {}

// A child process has neither the threads nor the memory, and perhaps a lock that nobody releases.
Snapshot::~Snapshot() {
  if (::getpid() != process_) static_cast<void>(copy_.release());
}

uint64_t Snapshot::first() const {
  return copy_->layout().first;
}

uint64_t Snapshot::bytes() const {
  return copy_->layout().copied_bytes;
}

void Snapshot::copy(unsigned threads) {
  copy_->begin();
  copy_->run(threads);
  copy_->wait();
}

void Snapshot::start(unsigned threads) {
  copy_->begin();
  copy_->run_in_background(threads);
}

void Snapshot::wait() {
  copy_->wait();
}

void Snapshot::cancel() {
  copy_->cancelled = true;
}

std::vector<int64_t> Snapshot::table() const {
  return copy_->table();
}

std::vector<uint64_t> Snapshot::offsets() const {
  std::vector<uint64_t> offsets = copy_->layout().offsets;
  std::ranges::replace(offsets, SnapshotLayout::kNowhere, uint64_t{0});
  return offsets;
}

std::span<std::byte> Snapshot::memory() const {
  return copy_->memory();
}

}  // namespace vescale_ckpt::stage
