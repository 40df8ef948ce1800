// Checks one inventory row of a rank against its key's class, and writes what does not fit as text for errors.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "plan/layout.h"
#include "state/inventory.h"

namespace vescale_ckpt::plan {

// Returns the bytes of a whole tensor; none if the shape is negative or impossibly large.
std::optional<uint64_t> shape_bytes(std::span<const int64_t> shape, uint64_t item_bytes);

// A place is an element's position in row-major order. Chunks sorted by the places of their first elements are sorted
// by their offsets.
constexpr uint64_t kEmptyChunk = UINT64_MAX;  // the place of a chunk without elements

// Returns the place of the chunk's first element, kEmptyChunk if it has none; nothing if the row does not fit. `shape`
// is the shape of the class and has passed shape_bytes.
inline std::optional<uint64_t> place_of(const state::Item& item, const Layout::Class& of,
                                        std::span<const int64_t> shape) {
  if (of.kind == state::ItemKind::object || item.kind == state::ItemKind::object) {
    if (item.kind != of.kind) return std::nullopt;
    return 0;
  }
  if (item.dtype != of.dtype || item.shape.size() != shape.size()) return std::nullopt;
  uint64_t place = 0, bytes = of.bytes;
  bool whole = true;
  for (size_t i = 0; i < shape.size(); ++i) {
    const int64_t length = shape[i], offset = item.offset[i], size = item.size[i];
    if (item.shape[i] != length || offset < 0 || offset > length || size < 0 || size > length - offset) {
      return std::nullopt;
    }
    whole &= size == length;
    bytes *= static_cast<uint64_t>(size);
    place = place * static_cast<uint64_t>(length) + static_cast<uint64_t>(offset);
  }
  if (item.bytes != bytes || (item.kind == state::ItemKind::tensor && !whole)) return std::nullopt;
  return bytes == 0 ? kEmptyChunk : place;
}

// Returns "(4, 8)".
std::string tuple_text(std::span<const int64_t> values);

// Returns "rank 3" or "ranks 0, 5-7, ... (1200 in all)". `ranks` are ascending.
std::string ranks_text(std::span<const uint32_t> ranks);

struct RankRow {
  uint32_t rank;
  state::Item item;
};

// Returns a text that says why rows of one key do not fit together. `rows` are in the order of their ranks; one of them
// has no place.
std::string explain_misfit(std::string_view name, const std::vector<RankRow>& rows, const Layout::Class& of,
                           std::span<const int64_t> shape);

}  // namespace vescale_ckpt::plan
