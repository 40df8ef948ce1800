// How rows are copied: which of them travel packed in a slab, which by 2-D copies, which by one large copy, cut into
// groups that each end in one event. Decides only; touches no memory. Not thread-safe.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "device/device.h"
#include "device/row.h"

namespace vescale_ckpt::device {

// What the copies must know of the host's memory.
struct HostLayout {
  uint64_t base = 0;         // address from which pieces are page-locked one by one
  uint64_t piece_bytes = 0;  // of such a piece; no copy crosses from one into the next. 0: nothing is cut
  uint64_t alignment = 1;  // what lies between the end of a row and the next multiple of this is the row's own, and may
                           // be overwritten: then rows that follow one another travel as one copy
  // Waits until copies to the piece that holds `at` may be queued; false after `timeout`. Empty: they may at once.
  std::function<bool(const std::byte* at, std::chrono::milliseconds timeout)> wait_until_usable = {};
};

struct CopyLimits {
  uint64_t slab_bytes = 8 << 20;    // 0: nothing is packed
  uint64_t small_bytes = 64 << 10;  // rows of up to so many are packed
  uint64_t pitched_run = 4 << 10;   // the shortest runs that 2-D copies are used for if there is a slab instead
  uint64_t group_bytes = 64 << 20;
  uint64_t group_copies = 4096;
};

// Copies that end in one event.
struct CopyGroup {
  PackTable table;             // if it has rows, the flat copies are from the slab to the host, and their `device`
  std::vector<FlatCopy> flat;  // is an offset in the slab
  std::vector<PitchedCopy> pitched;
  uint64_t bytes = 0;  // of rows, without what lies between them

  bool packed() const { return !table.rows.empty(); }
};

class CopyPlan {
 public:
  CopyPlan(std::vector<DeviceRow> rows, const HostLayout& layout, const CopyLimits& limits);

  const HostLayout& layout() const { return layout_; }
  bool packs() const { return !packed_.empty(); }
  void forgo_slab();  // before the first next(): pack nothing after all

  bool next(CopyGroup& group);  // false: there are no more

 private:
  bool is_packed(size_t index) const;
  bool joins(const DeviceRow& before, const DeviceRow& row) const;
  void pack_some(const DeviceRow& row, CopyGroup& group);
  void slab_copies(uint64_t offset, std::byte* host, uint64_t bytes, CopyGroup& group) const;
  void copy_some(const DeviceRow& row, CopyGroup& group);
  uint64_t to_border(const std::byte* host) const;

  std::vector<DeviceRow> rows_;
  HostLayout layout_;
  CopyLimits limits_;
  // Indices of rows. Packed ones go last: a slab holds rows from anywhere in the host's memory, so that its copies may
  // have to wait until all of that is page-locked.
  std::vector<uint32_t> direct_, packed_;
  size_t index_ = 0;  // in both, one after the other
  uint64_t at_ = 0;   // bytes of that row that are in groups
};

}  // namespace vescale_ckpt::device
