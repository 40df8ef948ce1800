#include "base/numbered_strings.h"

#include <functional>

#include "base/error.h"

namespace vescale_ckpt {
namespace {

uint32_t hash_of(std::string_view string) {
  return static_cast<uint32_t>(std::hash<std::string_view>()(string));
}

}  // namespace

size_t NumberedStrings::slot(std::string_view string, uint32_t hash) const {
  const size_t mask = slots_.size() - 1;
  size_t at = hash & mask;
  while (slots_[at].number != 0 && (slots_[at].hash != hash || (*this)[slots_[at].number - 1] != string)) {
    at = (at + 1) & mask;
  }
  return at;
}

std::pair<uint32_t, bool> NumberedStrings::add(std::string_view string) {
  const uint32_t hash = hash_of(string);
  Slot& found = slots_[slot(string, hash)];
  if (found.number != 0) return {found.number - 1, false};
  if (size() >= UINT32_MAX - 1) throw Error::invalid("more than 4 billion names");
  text_ += string;
  begins_.push_back(text_.size());
  const auto number = static_cast<uint32_t>(size() - 1);
  found = {hash, number + 1};
  if (size() * 2 > slots_.size()) grow();
  return {number, true};
}

std::optional<uint32_t> NumberedStrings::find(std::string_view string) const {
  const uint32_t found = slots_[slot(string, hash_of(string))].number;
  return found == 0 ? std::nullopt : std::optional(found - 1);
}

void NumberedStrings::grow() {
  std::vector<Slot> old(slots_.size() * 2);
  old.swap(slots_);
  const size_t mask = slots_.size() - 1;
  for (const Slot& moved : old) {
    if (moved.number == 0) continue;
    size_t at = moved.hash & mask;
    while (slots_[at].number != 0) at = (at + 1) & mask;
    slots_[at] = moved;
  }
}

}  // namespace vescale_ckpt
