// Plans copies of rows: which rows are packed in a slab, and which get 2-D copies or one large copy. Copies are cut
// into groups, each of which ends in one event. It touches no memory. Not thread-safe.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "device/device.h"

namespace vescale_ckpt::device {

// A tensor, or a part of one: on a device with any strides, and on the host dense in row-major order.
struct DeviceRow {
  // Strides are in elements. Throws Error(invalid) for a negative size or an overflow.
  DeviceRow(DeviceAddress device, std::byte* host, uint32_t item_bytes, std::span<const int64_t> sizes,
            std::span<const int64_t> strides);

  // Returns the address of the run that holds byte `at` of the dense order.
  DeviceAddress address_of_run(uint64_t at) const;

  DeviceAddress device;  // address of the first element
  std::byte* host;
  uint64_t bytes;
  uint64_t run;               // contiguous bytes on the device
  std::vector<PackDim> dims;  // dimensions of runs, outermost first; empty if the row is one run
};

// The properties of the host's memory that copies depend on.
struct HostLayout {
  uint64_t base = 0;         // pieces are page-locked one by one from this address on
  uint64_t piece_bytes = 0;  // size of such a piece; no copy crosses its border. 0: there are no pieces
  uint64_t alignment = 1;    // bytes between the end of a row and the next multiple of this may be overwritten, so that
                             // rows that follow each other become one copy
  // Waits until copies to the piece that holds `at` may be queued; false after `timeout`. Empty: no wait is needed.
  std::function<bool(const std::byte* at, std::chrono::milliseconds timeout)> wait_until_usable = {};
};

struct CopyLimits {
  uint64_t slab_bytes = 8 << 20;    // 0: nothing is packed
  uint64_t small_bytes = 64 << 10;  // rows of up to so many bytes are packed
  uint64_t pitched_run = 4 << 10;   // shorter runs are packed instead of copied by 2-D copies, if there is a slab
  uint64_t group_bytes = 64 << 20;
  uint64_t group_copies = 4096;
};

// Copies that end in one event.
struct CopyGroup {
  PackTable table;             // if it has rows, `flat` copies from the slab to the host, and `device` is an offset in
  std::vector<FlatCopy> flat;  // the slab
  std::vector<PitchedCopy> pitched;
  uint64_t bytes = 0;  // bytes of rows, without the gaps between them

  bool packed() const { return !table.rows.empty(); }
};

class CopyPlan {
 public:
  CopyPlan(std::vector<DeviceRow> rows, const HostLayout& layout, const CopyLimits& limits);

  const HostLayout& layout() const { return layout_; }
  bool packs() const { return !packed_.empty(); }
  void forgo_slab();  // packs nothing; call it before the first next()

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
  // Indices of rows. Packed rows go last: a slab has rows from anywhere in the host's memory, so its copies may have to
  // wait until all of this memory is page-locked.
  std::vector<uint32_t> direct_, packed_;
  size_t index_ = 0;  // index in direct_, then in packed_
  uint64_t at_ = 0;   // so many bytes of that row are in groups
};

}  // namespace vescale_ckpt::device
