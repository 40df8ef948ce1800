// A copy in host memory of the tensors of a write table, so that the trainer can change them while the copy is written.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "stage/device_part.h"
#include "stage/snapshot_arena.h"

namespace vescale_ckpt::stage {

// What is needed for rows that lie on accelerators.
struct SnapshotDevices {
  std::span<const int64_t> of_rows;      // for each row of the table, -1 for host memory or the device; empty: all host
  std::vector<Producer> producers;       // what is in these streams when the copy starts comes before it
  DevicePipelines* pipelines = nullptr;  // outlives the snapshot
};

// It is copied once, by copy() or by start() and wait(). Until all is copied the sources must stay and must not change.
// Thread-safe. After a fork it does nothing in the child.
class Snapshot {
 public:
  // Makes room for the last rows of a table for parse_write_table, as many as the budget has space for, on so many
  // threads. Throws Error(invalid, row).
  Snapshot(std::span<const int64_t> table, uint64_t budget_bytes, unsigned threads,
           SnapshotArena& arena = snapshot_arena(), const SnapshotDevices& devices = {});
  ~Snapshot();  // cancels
  Snapshot(const Snapshot&) = delete;
  Snapshot& operator=(const Snapshot&) = delete;

  uint64_t rows() const;   // of the table
  uint64_t first() const;  // the rows before this one are not in the snapshot
  uint64_t bytes() const;  // to copy: each byte once, however many rows share it
  uint64_t copied_bytes() const;

  // Copies on so many threads, the calling one included, and from all devices meanwhile. Throws Error(cancelled or
  // device), or invalid the second time.
  void copy(unsigned threads);
  // The same on threads of its own; only strided rows in host memory are copied before it returns. Errors of devices
  // are thrown by wait(), and Error(io, row) if host memory of a row is no longer mapped.
  void start(unsigned threads);
  // True when all is copied, false when that took longer than `timeout`. Throws what ended the copy, or Error(invalid)
  // if there is none under way.
  bool wait(std::optional<std::chrono::nanoseconds> timeout = std::nullopt);
  // Ends the copy soon; without effect once all is copied.
  void cancel();

  // The rows from first() on, of the copies: contiguous, dtypes and shapes as they were. Throws Error(invalid) before
  // all is copied.
  std::vector<int64_t> table() const;
  // The same as offsets in memory(), 0 for rows without bytes.
  std::vector<uint64_t> offsets() const;
  // What the copies lie in; the gaps between them hold anything.
  std::span<std::byte> memory() const;

 private:
  class Copy;
  const pid_t process_;
  std::unique_ptr<Copy> copy_;
};

}  // namespace vescale_ckpt::stage
