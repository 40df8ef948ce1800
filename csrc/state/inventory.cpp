#include "state/inventory.h"

#include <array>
#include <cstring>

#include "base/error.h"
#include "format/torch_record.h"

namespace vescale_ckpt::state {
namespace {

constexpr int64_t kMagic = 0x324D544956434B56;  // "VKCVITM2"
constexpr size_t kHeaderWords = 6;

[[noreturn]] void malformed_list(const char* what) {
  throw Error::invalid(std::string("a rank's list of items is malformed: ") + what);
}

size_t padded(size_t bytes) {
  return (bytes + 7) & ~size_t{7};
}

bool whole_words(std::span<const std::byte> bytes) {
  return reinterpret_cast<uintptr_t>(bytes.data()) % 8 == 0 && bytes.size() % 8 == 0;
}

struct Header {
  size_t items, rows, row_words, name_bytes;
  int64_t node;

  size_t row_bytes() const { return row_words * 8; }
  size_t number_bytes() const { return padded(items * 4); }
  size_t names_bytes() const { return padded(items * 4) + padded(name_bytes); }
};

// `room` is the number of bytes behind the header.
Header checked_header(std::span<const std::byte> bytes, size_t room) {
  if (!whole_words(bytes)) malformed_list("not whole words");
  if (bytes.size() < kHeaderWords * 8) malformed_list("too short");
  const auto* words = reinterpret_cast<const int64_t*>(bytes.data());
  if (words[0] != kMagic) malformed_list("not one");
  for (size_t i = 1; i <= 4; ++i) {
    if (words[i] < 0 || static_cast<uint64_t>(words[i]) > room) malformed_list("its lengths lie");
  }
  const Header header{static_cast<size_t>(words[1]), static_cast<size_t>(words[2]), static_cast<size_t>(words[3]),
                      static_cast<size_t>(words[4]), words[5]};
  if (header.row_words > UINT32_MAX || header.name_bytes > UINT32_MAX) malformed_list("too long");
  if (header.row_bytes() + header.number_bytes() + header.names_bytes() != room) malformed_list("its lengths lie");
  return header;
}

InventoryParts apart(const InventoryParts& parts) {
  if (!parts.rows.empty() || !parts.numbers.empty() || !parts.names.empty()) return parts;
  const std::span<const std::byte> bytes = parts.header;
  const size_t head = std::min(bytes.size(), kHeaderWords * 8);
  const Header header = checked_header(bytes, bytes.size() - head);
  const std::span<const std::byte> rows = bytes.subspan(head), numbers = rows.subspan(header.row_bytes());
  return {bytes.first(head), rows.first(header.row_bytes()), numbers.first(header.number_bytes()),
          numbers.subspan(header.number_bytes())};
}

}  // namespace

Inventory::Inventory(const InventoryParts& packed) : parts_(apart(packed)) {
  const InventoryParts& parts = parts_;
  if (parts.header.size() != kHeaderWords * 8) malformed_list("too short");
  const Header header = checked_header(parts.header, parts.rows.size() + parts.numbers.size() + parts.names.size());
  if (parts.rows.size() != header.row_bytes() || parts.numbers.size() != header.number_bytes()) {
    malformed_list("its lengths lie");
  }
  if (!whole_words(parts.rows) || !whole_words(parts.numbers) || !whole_words(parts.names)) {
    malformed_list("not whole words");
  }
  node_ = header.node;
  words_ = {reinterpret_cast<const int64_t*>(parts.rows.data()), header.row_words};
  numbers_ = {reinterpret_cast<const uint32_t*>(parts.numbers.data()), header.items};
  ends_ = reinterpret_cast<const uint32_t*>(parts.names.data());
  names_ = reinterpret_cast<const char*>(parts.names.data()) + padded(header.items * 4);
  check_rows(header.rows);
  check_items(header.items, header.name_bytes);
}

void Inventory::check_rows(size_t rows) {
  rows_.reserve(rows);
  const size_t known_dtypes = format::dtypes().size();
  size_t at = 0;
  for (size_t i = 0; i < rows; ++i) {
    if (words_.size() - at < 2) malformed_list("its rows end early");
    const auto head = static_cast<uint64_t>(words_[at]);
    const uint64_t kind = head & 0xFF, dtype = head >> 8 & 0xFF, ndim = head >> 32;
    if (kind > 2 || (kind != 0 && dtype >= known_dtypes)) malformed_list("an unknown kind or dtype");
    if (ndim > kMostDims || (kind == 0 && ndim != 0)) malformed_list("too many dimensions");
    if (words_[at + 1] < 0) malformed_list("a negative size");
    if (words_.size() - at - 2 < 3 * ndim) malformed_list("its rows end early");
    rows_.push_back(static_cast<uint32_t>(at));
    at += 2 + 3 * ndim;
  }
  if (at != words_.size()) malformed_list("rows that it does not count");
}

void Inventory::check_items(size_t items, size_t name_bytes) {
  uint32_t seen = 0;  // rows seen so far
  for (const uint32_t number : numbers_) {
    if (number > seen) malformed_list("its rows are not in the order of its items");
    seen += number == seen;
  }
  if (seen != rows_.size()) malformed_list(seen > rows_.size() ? "items without a row" : "rows that no item has");
  for (size_t i = 0; i < items; ++i) {
    if (ends_[i] > name_bytes || (i > 0 && ends_[i] < ends_[i - 1])) malformed_list("its names overlap");
  }
}

Item Inventory::operator[](size_t index) const {
  const int64_t* row = words_.data() + rows_[numbers_[index]];
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

Item whole_tensor(std::string_view name, uint8_t dtype, uint16_t flags, uint64_t bytes,
                  std::span<const int64_t> shape) {
  static constexpr std::array<int64_t, kMostDims> kOrigin{};
  if (shape.size() > kMostDims) throw Error::invalid(std::string(name) + " has too many dimensions");
  return {name, ItemKind::tensor, dtype, flags, bytes, shape, std::span(kOrigin).first(shape.size()), shape};
}

void pack_row(const Item& item, std::vector<int64_t>& row) {
  row.clear();
  row.push_back(static_cast<int64_t>(static_cast<uint64_t>(item.kind) | uint64_t{item.dtype} << 8 |
                                     uint64_t{item.flags} << 16 | static_cast<uint64_t>(item.shape.size()) << 32));
  row.push_back(static_cast<int64_t>(item.bytes));
  for (const auto dims : {item.shape, item.offset, item.size}) row.insert(row.end(), dims.begin(), dims.end());
}

void InventoryBuilder::add(const Item& item) {
  pack_row(item, row_);
  add(item.name, std::as_bytes(std::span(row_)));
}

void InventoryBuilder::add(std::string_view name, std::span<const std::byte> row) {
  uint64_t head = 0;
  if (row.size() >= sizeof head) std::memcpy(&head, row.data(), sizeof head);
  if (row.size() != (2 + 3 * (head >> 32)) * 8) throw Error::invalid("a row of an item is too short or too long");
  numbers_.push_back(rows_.add({reinterpret_cast<const char*>(row.data()), row.size()}).first);
  names_ += name;
  if (names_.size() > UINT32_MAX || rows_.text().size() / 8 > UINT32_MAX || numbers_.size() > UINT32_MAX) {
    throw Error::invalid("too many items on one rank");
  }
  ends_.push_back(static_cast<uint32_t>(names_.size()));
}

std::vector<std::byte> InventoryBuilder::pack(int64_t node) const {
  const std::string& rows = rows_.text();
  const int64_t header[kHeaderWords] = {kMagic,
                                        static_cast<int64_t>(numbers_.size()),
                                        static_cast<int64_t>(rows_.size()),
                                        static_cast<int64_t>(rows.size() / 8),
                                        static_cast<int64_t>(names_.size()),
                                        node};
  const size_t words_bytes = padded(numbers_.size() * 4);
  std::vector<std::byte> packed(sizeof header + rows.size() + 2 * words_bytes + padded(names_.size()));
  std::byte* at = packed.data();
  const auto put = [&](const void* from, size_t bytes, size_t room) {
    if (bytes > 0) std::memcpy(at, from, bytes);
    at += room;
  };
  put(header, sizeof header, sizeof header);
  put(rows.data(), rows.size(), rows.size());
  put(numbers_.data(), numbers_.size() * 4, words_bytes);
  put(ends_.data(), ends_.size() * 4, words_bytes);
  put(names_.data(), names_.size(), padded(names_.size()));
  return packed;
}

}  // namespace vescale_ckpt::state
