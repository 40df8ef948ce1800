#include "state/inventory.h"

#include <cstring>

#include "base/error.h"
#include "format/torch_record.h"

namespace vescale_ckpt::state {
namespace {

constexpr int64_t kMagic = 0x314D544956434B56;  // "VKCVITM1"
constexpr size_t kHeaderWords = 6;

[[noreturn]] void malformed_list(const char* what) {
  throw Error::invalid(std::string("a rank's list of items is malformed: ") + what);
}

size_t padded(size_t bytes) {
  return (bytes + 7) & ~size_t{7};
}

}  // namespace

Inventory::Inventory(std::span<const std::byte> bytes) {
  if (reinterpret_cast<uintptr_t>(bytes.data()) % 8 != 0 || bytes.size() % 8 != 0) malformed_list("not whole words");
  if (bytes.size() < kHeaderWords * 8) malformed_list("too short");
  const auto* header = reinterpret_cast<const int64_t*>(bytes.data());
  if (header[0] != kMagic) malformed_list("not one");
  const size_t room = bytes.size() - kHeaderWords * 8;
  for (size_t i = 1; i <= 3; ++i) {
    if (header[i] < 0 || static_cast<uint64_t>(header[i]) > room) malformed_list("its lengths lie");
  }
  const auto items = static_cast<size_t>(header[1]), row_words = static_cast<size_t>(header[2]),
             name_bytes = static_cast<size_t>(header[3]);
  if (row_words > UINT32_MAX || name_bytes > UINT32_MAX) malformed_list("too long");
  if (row_words * 8 + padded(items * 4) + padded(name_bytes) != room) malformed_list("its lengths lie");
  node_ = header[4];
  header_ = {header, kHeaderWords};
  words_ = {header + kHeaderWords, row_words};
  names_block_ = bytes.subspan((kHeaderWords + row_words) * 8);
  ends_ = reinterpret_cast<const uint32_t*>(names_block_.data());
  names_ = reinterpret_cast<const char*>(names_block_.data()) + padded(items * 4);

  rows_.reserve(items);
  const size_t known_dtypes = format::dtypes().size();
  size_t at = 0;
  for (size_t i = 0; i < items; ++i) {
    if (row_words - at < 2) malformed_list("its rows end early");
    const auto head = static_cast<uint64_t>(words_[at]);
    const uint64_t kind = head & 0xFF, dtype = head >> 8 & 0xFF, ndim = head >> 32;
    if (kind > 2 || (kind != 0 && dtype >= known_dtypes)) malformed_list("an unknown kind or dtype");
    if (ndim > kMostDims || (kind == 0 && ndim != 0)) malformed_list("too many dimensions");
    if (words_[at + 1] < 0) malformed_list("a negative size");
    if (row_words - at - 2 < 3 * ndim) malformed_list("its rows end early");
    if (ends_[i] > name_bytes || (i > 0 && ends_[i] < ends_[i - 1])) malformed_list("its names overlap");
    rows_.push_back(static_cast<uint32_t>(at));
    at += 2 + 3 * ndim;
  }
  if (at != row_words) malformed_list("rows that no item has");
}

Item Inventory::operator[](size_t index) const {
  const int64_t* row = words_.data() + rows_[index];
  const auto head = static_cast<uint64_t>(row[0]);
  const size_t ndim = head >> 32;
  Item item;
  item.name = name(index);
  item.kind = static_cast<ItemKind>(head & 0xFF);
  item.dtype = static_cast<uint8_t>(head >> 8);
  item.flags = static_cast<uint16_t>(head >> 16);
  item.bytes = static_cast<uint64_t>(row[1]);
  item.shape = {row + 2, ndim};
  item.offset = {row + 2 + ndim, ndim};
  item.size = {row + 2 + 2 * ndim, ndim};
  return item;
}

std::string_view Inventory::name(size_t index) const {
  const uint32_t begin = index == 0 ? 0 : ends_[index - 1];
  return {names_ + begin, ends_[index] - begin};
}

void InventoryBuilder::add(const Item& item) {
  words_.push_back(static_cast<int64_t>(static_cast<uint64_t>(item.kind) | uint64_t{item.dtype} << 8 |
                                        uint64_t{item.flags} << 16 | static_cast<uint64_t>(item.shape.size()) << 32));
  words_.push_back(static_cast<int64_t>(item.bytes));
  for (const auto dims : {item.shape, item.offset, item.size}) words_.insert(words_.end(), dims.begin(), dims.end());
  names_ += item.name;
  if (names_.size() > UINT32_MAX || words_.size() > UINT32_MAX) throw Error::invalid("too many items on one rank");
  ends_.push_back(static_cast<uint32_t>(names_.size()));
}

std::vector<std::byte> InventoryBuilder::pack(int64_t node) const {
  const int64_t header[kHeaderWords] = {kMagic,
                                        static_cast<int64_t>(ends_.size()),
                                        static_cast<int64_t>(words_.size()),
                                        static_cast<int64_t>(names_.size()),
                                        node,
                                        0};
  const size_t ends_bytes = padded(ends_.size() * 4);
  std::vector<std::byte> packed(sizeof header + words_.size() * 8 + ends_bytes + padded(names_.size()));
  std::byte* at = packed.data();
  std::memcpy(at, header, sizeof header);
  at += sizeof header;
  if (!words_.empty()) std::memcpy(at, words_.data(), words_.size() * 8);
  at += words_.size() * 8;
  if (!ends_.empty()) std::memcpy(at, ends_.data(), ends_.size() * 4);
  at += ends_bytes;
  if (!names_.empty()) std::memcpy(at, names_.data(), names_.size());
  return packed;
}

}  // namespace vescale_ckpt::state
