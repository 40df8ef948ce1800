// Finds the node of memory that the accelerators of a process are next to, on machines that have several nodes.
#pragma once

#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <utility>

namespace vescale_ckpt::device {

// Not thread-safe.
class NearestNode {
 public:
  explicit NearestNode(std::filesystem::path sysfs = "/sys") : sysfs_(std::move(sysfs)) {}

  void add(const std::string& pci_address);  // of an accelerator: "0000:3b:00.0"
  // The node of all accelerators that were added; nullopt where they differ, where the system does not know it, and on
  // machines of one node.
  std::optional<int> node() const;

 private:
  const std::filesystem::path sysfs_;
  std::set<int> nodes_;  // -1: unknown
};

}  // namespace vescale_ckpt::device
