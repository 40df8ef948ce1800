#include "metadata/key_paths.h"

#include <unordered_set>

#include "base/error.h"

namespace vescale_ckpt::metadata {
namespace {

[[noreturn]] void malformed() {
  throw Error::invalid("a rank's list of paths of keys is malformed");
}

template <typename Value>
Value take_checked(std::string_view& rest) {
  if (rest.size() < sizeof(Value)) malformed();
  return detail::take<Value>(rest);
}

std::string_view take_text(std::string_view& rest, uint32_t bytes) {
  if (rest.size() < bytes) malformed();
  const std::string_view text = rest.substr(0, bytes);
  rest.remove_prefix(bytes);
  return text;
}

}  // namespace

void KeyPathsBuilder::name(std::string_view name, uint32_t elements) {
  if (name.size() >= detail::kNumber) throw Error::invalid("a key is absurdly long");
  ++names_;
  append(static_cast<uint32_t>(name.size()));
  append(elements);
  packed_ += name;
}

void KeyPathsBuilder::text(std::string_view element) {
  if (element.size() >= detail::kNumber) throw Error::invalid("a key is absurdly long");
  append(static_cast<uint32_t>(element.size()));
  packed_ += element;
}

void KeyPathsBuilder::number(int64_t element) {
  append(detail::kNumber);
  append(element);
}

std::string KeyPathsBuilder::pack() const {
  return std::string(reinterpret_cast<const char*>(&names_), sizeof names_) + packed_;
}

KeyPaths::KeyPaths(const std::vector<std::span<const std::byte>>& blocks) {
  std::unordered_set<std::string_view> merged;
  for (const auto bytes : blocks) {
    const std::string_view block(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    if (!block.empty() && merged.insert(block).second) merge(block);
    any_ = any_ || !block.empty();
  }
}

void KeyPaths::merge(std::string_view block) {
  std::string_view rest = block;
  for (auto names = take_checked<uint64_t>(rest); names > 0; --names) {
    Path path;
    const auto name_bytes = take_checked<uint32_t>(rest);
    path.elements = take_checked<uint32_t>(rest);
    path.name = take_text(rest, name_bytes);
    const std::string_view elements = rest;
    for (uint32_t i = 0; i < path.elements; ++i) {
      const auto bytes = take_checked<uint32_t>(rest);
      take_text(rest, bytes == detail::kNumber ? sizeof(int64_t) : bytes);
    }
    path.packed = elements.substr(0, elements.size() - rest.size());
    if (names_.add(path.name).second) paths_.push_back(path);
  }
  if (!rest.empty()) malformed();
}

}  // namespace vescale_ckpt::metadata
