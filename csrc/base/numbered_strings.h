// A hash table that keeps each string once and numbers the strings in order of first appearance. For millions of short
// ones: keys, shapes, sets of ranks.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace vescale_ckpt {

// Strings are any bytes. Not thread-safe.
class NumberedStrings {
 public:
  size_t size() const { return begins_.size() - 1; }
  // Valid until the next string is added.
  std::string_view operator[](size_t number) const {
    return std::string_view(text_).substr(begins_[number], begins_[number + 1] - begins_[number]);
  }
  const std::string& text() const { return text_; }  // all strings, one after another
  uint64_t begin(size_t number) const { return begins_[number]; }

  // Its number, and whether it is new. Throws Error (invalid) if there are more than 4 billion strings.
  std::pair<uint32_t, bool> add(std::string_view string);
  std::optional<uint32_t> find(std::string_view string) const;

 private:
  struct Slot {
    uint32_t hash = 0;
    uint32_t number = 0;  // plus 1; 0 where free
  };

  size_t slot(std::string_view string, uint32_t hash) const;  // where it is, or where it would go
  void grow();

  std::string text_;
  std::vector<uint64_t> begins_ = {0};
  std::vector<Slot> slots_ = std::vector<Slot>(64);  // open addressing
};

}  // namespace vescale_ckpt
