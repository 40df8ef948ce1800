#include "plan/error_texts.h"

namespace vescale_ckpt::plan {
namespace {

constexpr size_t kMostParts = 8;  // a message lists at most so many

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

}  // namespace vescale_ckpt::plan
