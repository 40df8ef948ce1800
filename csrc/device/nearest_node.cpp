#include "device/nearest_node.h"

#include <algorithm>
#include <cctype>
#include <fstream>

namespace vescale_ckpt::device {

void NearestNode::add(const std::string& pci_address) {
  std::string name = pci_address;  // CUDA writes it in capitals
  std::ranges::transform(name, name.begin(), [](unsigned char letter) { return std::tolower(letter); });
  int node = -1;
  std::ifstream(sysfs_ / "bus/pci/devices" / name / "numa_node") >> node;
  nodes_.insert(node < 0 ? -1 : node);
}

std::optional<int> NearestNode::node() const {
  std::string with_memory;  // "0-1", or "0" if there is one
  std::ifstream(sysfs_ / "devices/system/node/has_memory") >> with_memory;
  if (with_memory.find_first_of(",-") == std::string::npos) return std::nullopt;
  if (nodes_.size() != 1 || *nodes_.begin() < 0) return std::nullopt;
  return *nodes_.begin();
}

}  // namespace vescale_ckpt::device
