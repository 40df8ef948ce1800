// Packs the path of each flattened name in the nested state (DCP's planner_data).
//
// A rank packs its names; the coordinator merges the ranks' blocks. Most blocks are equal.
//
//   u64 names, then for each: u32 bytes of the name, u32 elements, the name, the elements
//   an element: u32 bytes and text, or u32 0xFFFFFFFF and an i64
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/numbered_strings.h"

namespace vescale_ckpt::metadata {

class KeyPathsBuilder {
 public:
  // Begins a path of `elements` elements, which must follow.
  void name(std::string_view name, uint32_t elements);
  void text(std::string_view element);
  void number(int64_t element);
  std::string pack() const;

 private:
  template <typename Number>
  void append(Number number) {
    packed_.append(reinterpret_cast<const char*>(&number), sizeof number);
  }
  uint64_t names_ = 0;
  std::string packed_;
};

// A view of the blocks, which must outlive it. If several blocks have a name, the first counts. An empty block comes
// from a rank whose state was not flattened.
class KeyPaths {
 public:
  struct Path {
    std::string_view name;
    uint32_t elements;
    std::string_view packed;  // the packed elements
  };

  // Checks every length. Throws Error (invalid).
  explicit KeyPaths(const std::vector<std::span<const std::byte>>& blocks);

  // Whether any rank flattened its state.
  bool any() const { return any_; }
  // Paths are in the order in which they were first named.
  const std::vector<Path>& paths() const { return paths_; }
  // Returns an index into paths().
  std::optional<uint32_t> find(std::string_view name) const { return names_.find(name); }

  // Calls `text(view)` or `number(value)` for each element.
  template <typename Text, typename Number>
  static void visit(const Path& path, const Text& text, const Number& number);

 private:
  void merge(std::string_view block);
  bool any_ = false;
  std::vector<Path> paths_;
  NumberedStrings names_;  // names of paths_
};

namespace detail {
constexpr uint32_t kNumber = UINT32_MAX;  // it replaces a text's length

// Removes a number from the front of `rest`, which must have it.
template <typename Value>
Value take(std::string_view& rest) {
  Value value;
  std::memcpy(&value, rest.data(), sizeof value);
  rest.remove_prefix(sizeof value);
  return value;
}
}  // namespace detail

template <typename Text, typename Number>
void KeyPaths::visit(const Path& path, const Text& text, const Number& number) {
  std::string_view rest = path.packed;
  for (uint32_t i = 0; i < path.elements; ++i) {
    if (const auto bytes = detail::take<uint32_t>(rest); bytes != detail::kNumber) {
      text(rest.substr(0, bytes));
      rest.remove_prefix(bytes);
    } else {
      number(detail::take<int64_t>(rest));
    }
  }
}

}  // namespace vescale_ckpt::metadata
