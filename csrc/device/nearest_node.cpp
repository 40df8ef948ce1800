#include "device/nearest_node.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cstdio>
#include <memory>

namespace vescale_ckpt::device {
namespace {

// Returns the first line of a short file; an empty text if there is no such file. A stream of the standard library
// would use its locale, and crashed in a process of two C++ libraries: torch's, and one linked statically into the
// engine.
std::string first_line(const std::string& path) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "re"), &std::fclose);
  std::array<char, 256> text{};
  if (!file || std::fgets(text.data(), text.size(), file.get()) == nullptr) return {};
  std::string line = text.data();
  while (!line.empty() && std::isspace(static_cast<unsigned char>(line.back())) != 0) line.pop_back();
  return line;
}

}  // namespace

void NearestNode::add(const std::string& pci_address) {
  std::string name = pci_address;  // CUDA writes it in capitals
  std::ranges::transform(name, name.begin(), [](unsigned char letter) { return std::tolower(letter); });
  const std::string text = first_line(sysfs_ + "/bus/pci/devices/" + name + "/numa_node");
  int node = -1;
  std::from_chars(text.data(), text.data() + text.size(), node);
  nodes_.insert(node < 0 ? -1 : node);
}

std::optional<int> NearestNode::node() const {
  const std::string with_memory = first_line(sysfs_ + "/devices/system/node/has_memory");  // "0-1", or "0" if it is one
  if (with_memory.find_first_of(",-") == std::string::npos) return std::nullopt;
  if (nodes_.size() != 1 || *nodes_.begin() < 0) return std::nullopt;
  return *nodes_.begin();
}

}  // namespace vescale_ckpt::device
