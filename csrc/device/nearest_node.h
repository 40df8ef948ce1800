// Finds the memory node that is nearest to the accelerators of a process, on machines with several nodes.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <utility>

namespace vescale_ckpt::device {

// Not thread-safe.
class NearestNode {
 public:
  explicit NearestNode(std::string sysfs = "/sys") : sysfs_(std::move(sysfs)) {}

  void add(const std::string& pci_address);  // address of an accelerator: "0000:3b:00.0"
  // Returns the node of all added accelerators; nullopt if they differ, if the system does not know it, and on machines
  // with one node.
  std::optional<int> node() const;

 private:
  const std::string sysfs_;
  std::set<int> nodes_;  // -1: unknown
};

}  // namespace vescale_ckpt::device
