// Copies the tensors of a write table to host memory, so that the trainer can change them while the copy is written.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "stage/device_pipelines.h"
#include "stage/snapshot_arena.h"

namespace vescale_ckpt::stage {

// The arguments for rows on accelerators.
struct SnapshotDevices {
  std::span<const int64_t> of_rows;      // the device of each row of the table, -1: host memory; empty: all host memory
  std::vector<Producer> producers;       // the copy runs after the work in these streams at its start
  DevicePipelines* pipelines = nullptr;  // outlives the snapshot
};

// Its rows are copied once, by copy() or by start() and wait(). Until all is copied, the sources must live and must not
// change. Thread-safe. After a fork it does nothing in the child.
class Snapshot {
 public:
  // Allocates memory for the last rows of a table for parse_write_table, as many as the budget allows, on so many
  // threads. Throws Error(invalid, row).
  Snapshot(std::span<const int64_t> table, uint64_t budget_bytes, unsigned threads,
           SnapshotArena& arena = snapshot_arena(), const SnapshotDevices& devices = {});
  ~Snapshot();  // cancels
  Snapshot(const Snapshot&) = delete;
  Snapshot& operator=(const Snapshot&) = delete;

  uint64_t first() const;  // rows before this one are not in the snapshot
  uint64_t bytes() const;  // bytes to copy; a byte that several rows share counts once

  // Copies on so many threads, including the calling one, and from all devices at the same time. Throws Error(cancelled
  // or device), or invalid at the second call.
  void copy(unsigned threads);
  // Does the same on new threads. Copies only strided rows in host memory before it returns. wait() throws errors of
  // devices, and Error(io, row) if host memory of a row is no longer mapped.
  void start(unsigned threads);
  // Returns when all is copied. Throws the error of the copy, or Error(invalid) if there was no start().
  void wait();
  // Ends the copy soon. Has no effect after its end.
  void cancel();

  // Returns the write table of the copies, for the rows from first() on: contiguous, with the same dtypes and shapes,
  // and with io::kUnchanging, which holds until the snapshot is destroyed.
  // Throws Error(invalid) before all is copied.
  std::vector<int64_t> table() const;
  // Returns the same as offsets in memory(), 0 for rows without bytes.
  std::vector<uint64_t> offsets() const;
  // Returns the memory of the copies. The gaps between them have undefined content.
  std::span<std::byte> memory() const;

 private:
  class Copy;
  const pid_t process_;
  std::unique_ptr<Copy> copy_;
};

}  // namespace vescale_ckpt::stage
