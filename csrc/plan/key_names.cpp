#include "plan/key_names.h"

#include <functional>

#include "base/error.h"

namespace vescale_ckpt::plan {

size_t KeyNames::slot(std::string_view name) const {
  const size_t mask = slots_.size() - 1;
  size_t at = std::hash<std::string_view>()(name) & mask;
  while (slots_[at] != 0 && (*this)[slots_[at] - 1] != name) at = (at + 1) & mask;
  return at;
}

std::pair<uint32_t, bool> KeyNames::add(std::string_view name) {
  const size_t at = slot(name);
  if (slots_[at] != 0) return {slots_[at] - 1, false};
  if (size() >= UINT32_MAX - 1) throw Error::invalid("more than 4 billion names");
  text_ += name;
  begins_.push_back(text_.size());
  const auto number = static_cast<uint32_t>(size() - 1);
  slots_[at] = number + 1;
  if (size() * 2 > slots_.size()) grow();
  return {number, true};
}

std::optional<uint32_t> KeyNames::find(std::string_view name) const {
  const uint32_t found = slots_[slot(name)];
  return found == 0 ? std::nullopt : std::optional(found - 1);
}

void KeyNames::grow() {
  slots_.assign(slots_.size() * 2, 0);
  for (size_t number = 0; number < size(); ++number) slots_[slot((*this)[number])] = static_cast<uint32_t>(number + 1);
}

}  // namespace vescale_ckpt::plan
