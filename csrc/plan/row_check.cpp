#include "plan/row_check.h"

#include <algorithm>
#include <utility>

#include "format/torch_record.h"

namespace vescale_ckpt::plan {
namespace {

constexpr size_t kMostParts = 8;  // a message lists at most so many

// Returns "rank 0 has shape (4, 8), ranks 3, 5-7 have (4, 16)". `values`: each value with its ranks, ascending.
std::string disagreement_text(std::string_view property,
                              std::span<const std::pair<std::string, std::vector<uint32_t>>> values) {
  std::string text;
  for (size_t i = 0; i < values.size(); ++i) {
    if (i == kMostParts) return text + ", and " + std::to_string(values.size() - i) + " more values";
    if (i > 0) text += ", ";
    text += ranks_text(values[i].second) + (values[i].second.size() == 1 ? " has " : " have ");
    if (i == 0 && !property.empty()) text += std::string(property) + " ";
    text += values[i].first;
  }
  return text;
}

// Returns which ranks have which value, if there is more than one value.
template <typename Text>
std::string difference(const char* property, const std::vector<RankRow>& rows, const Text& text_of) {
  std::vector<std::pair<std::string, std::vector<uint32_t>>> values;
  for (const RankRow& row : rows) {
    std::string text = text_of(row.item);
    auto found = std::find_if(values.begin(), values.end(), [&](const auto& value) { return value.first == text; });
    if (found == values.end()) found = values.emplace(values.end(), std::move(text), std::vector<uint32_t>());
    if (found->second.empty() || found->second.back() != row.rank) found->second.push_back(row.rank);
  }
  return values.size() < 2 ? std::string() : disagreement_text(property, values);
}

std::string kind_text(const state::Item& item) {
  return item.kind == state::ItemKind::object ? "an object" : "a tensor";
}

std::string dtype_text(const state::Item& item) {
  return std::string(format::dtypes()[item.dtype].name);
}

std::string chunk_fault(const RankRow& row, const Layout::Class& of, std::span<const int64_t> shape) {
  const std::string holder = "rank " + std::to_string(row.rank) + " has the chunk at offset " +
                             tuple_text(row.item.offset) + " of size " + tuple_text(row.item.size);
  for (size_t i = 0; i < shape.size(); ++i) {
    const int64_t offset = row.item.offset[i], size = row.item.size[i];
    if (offset < 0 || offset > shape[i] || size < 0 || size > shape[i] - offset) {
      return holder + ", which is not within the shape " + tuple_text(shape);
    }
  }
  if (row.item.kind == state::ItemKind::tensor && !std::equal(shape.begin(), shape.end(), row.item.size.begin())) {
    return holder + " as a whole tensor of shape " + tuple_text(shape);
  }
  return holder + " in " + std::to_string(row.item.bytes) + " bytes, which are not " + std::to_string(of.bytes) +
         " an element";
}

}  // namespace

std::string tuple_text(std::span<const int64_t> values) {
  std::string text = "(";
  for (size_t i = 0; i < values.size(); ++i) text += (i > 0 ? ", " : "") + std::to_string(values[i]);
  return text + (values.size() == 1 ? ",)" : ")");
}

std::string ranks_text(std::span<const uint32_t> ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  size_t parts = 0;
  for (size_t begin = 0, end = 0; begin < ranks.size(); begin = end, ++parts) {
    if (parts == kMostParts) return text + ", ... (" + std::to_string(ranks.size()) + " in all)";
    for (end = begin + 1; end < ranks.size() && ranks[end] == ranks[end - 1] + 1;) ++end;
    if (parts > 0) text += ", ";
    text += std::to_string(ranks[begin]);
    if (end - begin > 1) text += (end - begin == 2 ? ", " : "-") + std::to_string(ranks[end - 1]);
  }
  return text;
}

std::optional<uint64_t> shape_bytes(std::span<const int64_t> shape, uint64_t item_bytes) {
  if (std::any_of(shape.begin(), shape.end(), [](int64_t length) { return length < 0; })) return std::nullopt;
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  uint64_t bytes = item_bytes;
  for (const int64_t length : shape) {
    if (__builtin_mul_overflow(bytes, static_cast<uint64_t>(length), &bytes) || bytes > INT64_MAX) return std::nullopt;
  }
  return bytes;
}

std::string explain_misfit(std::string_view name, const std::vector<RankRow>& rows, const Layout::Class& of,
                           std::span<const int64_t> shape) {
  const std::string begin = std::string(name) + ": ";
  if (auto text = difference("", rows, kind_text); !text.empty()) return begin + text;
  if (auto text = difference("dtype", rows, dtype_text); !text.empty()) return begin + text;
  if (auto text = difference("shape", rows, [](const state::Item& item) { return tuple_text(item.shape); });
      !text.empty()) {
    return begin + text;
  }
  if (!shape_bytes(shape, of.bytes)) return begin + "a tensor cannot have the shape " + tuple_text(shape);
  const auto misfit =
      std::find_if(rows.begin(), rows.end(), [&](const RankRow& row) { return !place_of(row.item, of, shape); });
  return begin + chunk_fault(*misfit, of, shape);
}

}  // namespace vescale_ckpt::plan
