// Names and their numbers: each name kept once, numbered in order of first appearance.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace vescale_ckpt::plan {

class KeyNames {
 public:
  size_t size() const { return begins_.size() - 1; }
  std::string_view operator[](size_t number) const {
    return std::string_view(text_).substr(begins_[number], begins_[number + 1] - begins_[number]);
  }
  const std::string& text() const { return text_; }  // all names, one after another
  uint64_t begin(size_t number) const { return begins_[number]; }

  // Its number, and whether it is new.
  std::pair<uint32_t, bool> add(std::string_view name);
  std::optional<uint32_t> find(std::string_view name) const;

 private:
  size_t slot(std::string_view name) const;  // where it is, or where it would go
  void grow();

  std::string text_;
  std::vector<uint64_t> begins_ = {0};
  std::vector<uint32_t> slots_ = std::vector<uint32_t>(64);  // number + 1, 0 where free; open addressing
};

}  // namespace vescale_ckpt::plan
