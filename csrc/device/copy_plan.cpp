#include "device/copy_plan.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/memory.h"

namespace vescale_ckpt::device {
namespace {

constexpr uint64_t kMaxUnit = 16;
constexpr int64_t kMaxPitch = INT32_MAX;  // the limit for 2-D copies on all known devices

uint64_t address_of(const std::byte* host) {
  return reinterpret_cast<uintptr_t>(host);
}

// Returns the largest unit that divides all parts of a packed row.
uint64_t common_unit(const DeviceRow& row, uint64_t offset, uint64_t at) {
  uint64_t all = kMaxUnit | row.device | row.run | offset | at;
  for (const PackDim& dim : row.dims) all |= static_cast<uint64_t>(dim.stride);
  return all & (~all + 1);
}

}  // namespace

DeviceRow::DeviceRow(DeviceAddress device, std::byte* host, uint32_t item_bytes, std::span<const int64_t> sizes,
                     std::span<const int64_t> strides)
    : device(device), host(host), bytes(item_bytes), run(item_bytes) {
  for (size_t dim = sizes.size(); dim-- > 0;) {
    const auto count = static_cast<uint64_t>(sizes[dim]);
    if (sizes[dim] < 0 || __builtin_mul_overflow(bytes, count, &bytes)) {
      throw Error::invalid("a size of " + std::to_string(sizes[dim]) + " in dimension " + std::to_string(dim));
    }
    if (count == 1) continue;
    int64_t stride = 0;
    if (__builtin_mul_overflow(strides[dim], static_cast<int64_t>(item_bytes), &stride)) {
      throw Error::invalid("a stride of " + std::to_string(strides[dim]) + " elements overflows");
    }
    if (dims.empty() && stride == static_cast<int64_t>(run)) {
      run *= count;
    } else if (!dims.empty() &&
               static_cast<uint64_t>(stride) == dims.back().count * static_cast<uint64_t>(dims.back().stride)) {
      dims.back().count *= count;
    } else {
      dims.push_back({count, stride});
    }
  }
  std::reverse(dims.begin(), dims.end());
  if (bytes == 0) dims.clear();
}

DeviceAddress DeviceRow::address_of_run(uint64_t at) const {
  uint64_t index = at / run;
  int64_t offset = 0;
  for (size_t dim = dims.size(); dim-- > 0;) {
    offset += static_cast<int64_t>(index % dims[dim].count) * dims[dim].stride;
    index /= dims[dim].count;
  }
  return device + static_cast<uint64_t>(offset);
}

CopyPlan::CopyPlan(std::vector<DeviceRow> rows, const HostLayout& layout, const CopyLimits& limits)
    : rows_(std::move(rows)), layout_(layout), limits_(limits) {
  for (size_t i = 0; i < rows_.size(); ++i) {
    if (rows_[i].bytes == 0) continue;
    (is_packed(i) ? packed_ : direct_).push_back(static_cast<uint32_t>(i));
  }
}

void CopyPlan::forgo_slab() {
  direct_.insert(direct_.end(), packed_.begin(), packed_.end());
  packed_.clear();
  limits_.slab_bytes = 0;
}

// Packing is worth it if it makes one copy of many.
bool CopyPlan::is_packed(size_t index) const {
  const DeviceRow& row = rows_[index];
  if (limits_.slab_bytes == 0) return false;
  if (!row.dims.empty()) {
    return row.run < limits_.pitched_run || row.run * row.dims.back().count <= limits_.small_bytes;
  }
  return row.bytes <= limits_.small_bytes &&
         ((index > 0 && joins(rows_[index - 1], row)) || (index + 1 < rows_.size() && joins(row, rows_[index + 1])));
}

bool CopyPlan::joins(const DeviceRow& before, const DeviceRow& row) const {
  return align_up(address_of(before.host) + before.bytes, layout_.alignment) == address_of(row.host);
}

uint64_t CopyPlan::to_border(const std::byte* host) const {
  if (layout_.piece_bytes == 0) return UINT64_MAX;
  const uint64_t from_base = address_of(host) - layout_.base;
  return layout_.piece_bytes - from_base % layout_.piece_bytes;
}

bool CopyPlan::next(CopyGroup& group) {
  group.table.rows.clear();
  group.table.dims.clear();
  group.table.bytes = 0;
  group.flat.clear();
  group.pitched.clear();
  group.bytes = 0;
  while (index_ < direct_.size() + packed_.size()) {
    const bool packed = index_ >= direct_.size();
    if (packed && group.bytes != 0 && !group.packed()) break;
    const DeviceRow& row = rows_[packed ? packed_[index_ - direct_.size()] : direct_[index_]];
    const uint64_t before = at_;
    packed ? pack_some(row, group) : copy_some(row, group);
    if (at_ == row.bytes) {
      ++index_;
      at_ = 0;
    } else if (at_ == before) {
      break;  // the group is full
    }
  }
  return group.bytes != 0;
}

// Packs as much of the row as the slab and its table have room for.
void CopyPlan::pack_some(const DeviceRow& row, CopyGroup& group) {
  PackTable& table = group.table;
  std::byte* host = row.host + at_;
  uint64_t offset = align_up(table.bytes, kMaxUnit);
  if (!group.flat.empty()) {  // the slab copies the host's layout if that is allowed
    const FlatCopy& last = group.flat.back();
    const uint64_t host_end = address_of(last.host) + last.bytes;
    if (align_up(host_end, layout_.alignment) == address_of(host)) offset = table.bytes + address_of(host) - host_end;
  }
  if (offset >= limits_.slab_bytes || table.rows.size() == kPackRows) return;
  uint64_t bytes = std::min(row.bytes - at_, limits_.slab_bytes - offset);
  PackRow packed{row.device, 0, static_cast<uint32_t>(offset), 0, 0, 0, 0, 0};
  if (row.dims.empty()) {
    packed.address += at_;
  } else {
    const uint64_t unit = common_unit(row, offset, at_);
    if (bytes < row.bytes - at_) bytes = align_down(bytes, kMaxUnit);
    if (bytes == 0 || table.dims.size() + row.dims.size() + 1 > kPackDims) return;
    packed.first = at_ / unit;
    packed.unit = static_cast<uint32_t>(unit);
    packed.dims_at = static_cast<uint32_t>(table.dims.size());
    table.dims.insert(table.dims.end(), row.dims.begin(), row.dims.end());
    if (row.run != unit) table.dims.push_back({row.run / unit, static_cast<int64_t>(unit)});
    packed.dims = static_cast<uint32_t>(table.dims.size()) - packed.dims_at;
  }
  packed.bytes = static_cast<uint32_t>(bytes);
  table.rows.push_back(packed);
  slab_copies(offset, host, bytes, group);
  table.bytes = static_cast<uint32_t>(offset + bytes);
  group.bytes += bytes;
  at_ += bytes;
}

// Adds copies to the host of the bytes that were packed at `offset`. Extends the copy before if possible.
void CopyPlan::slab_copies(uint64_t offset, std::byte* host, uint64_t bytes, CopyGroup& group) const {
  if (!group.flat.empty()) {
    FlatCopy& last = group.flat.back();
    const uint64_t reach = address_of(host) - address_of(last.host);  // wraps around if host lies before it
    if (reach == offset - last.device && reach < to_border(last.host)) {
      const uint64_t joined = std::min(reach + bytes, to_border(last.host));
      bytes -= joined - reach;
      offset += joined - reach;
      host += joined - reach;
      last.bytes = joined;
    }
  }
  while (bytes != 0) {
    const uint64_t part = std::min(bytes, to_border(host));
    group.flat.push_back({offset, host, part});
    offset += part;
    host += part;
    bytes -= part;
  }
}

// Adds copies from the device to the host for as much of the row as the group has room for.
void CopyPlan::copy_some(const DeviceRow& row, CopyGroup& group) {
  const PackDim inner = row.dims.empty() ? PackDim{1, 0} : row.dims.back();
  const bool has_pitch = inner.stride >= static_cast<int64_t>(row.run) && inner.stride <= kMaxPitch;
  while (at_ < row.bytes && group.bytes < limits_.group_bytes &&
         group.flat.size() + group.pitched.size() < limits_.group_copies) {
    const uint64_t inside = at_ % row.run;  // it is not 0 after a cut
    const DeviceAddress device = row.address_of_run(at_) + inside;
    std::byte* host = row.host + at_;
    const uint64_t room = std::min(to_border(host), limits_.group_bytes - group.bytes);
    uint64_t height = 0;
    if (has_pitch && inside == 0) height = std::min(inner.count - at_ / row.run % inner.count, room / row.run);
    uint64_t bytes = 0;
    if (height > 1) {
      bytes = height * row.run;
      group.pitched.push_back({device, host, static_cast<uint64_t>(inner.stride), row.run, row.run, height});
    } else {
      bytes = std::min(row.run - inside, room);
      group.flat.push_back({device, host, bytes});
    }
    at_ += bytes;
    group.bytes += bytes;
  }
}

}  // namespace vescale_ckpt::device
