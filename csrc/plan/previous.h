// Who wrote a box in the plan before.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "plan/assign.h"
#include "plan/balance.h"

namespace vescale_ckpt::plan {

class PreviousOwners {
 public:
  PreviousOwners(const Previous& previous, const Layout& layout) : previous_(previous), layout_(layout) {}

  // Appends the shares of that box of key number `key` if it had the same key and box then and all who wrote it are
  // among `holders` (ascending), and returns the dimension of their rows. Else appends nothing and returns -1.
  int32_t find(uint32_t key, size_t box, std::span<const Holder> holders, std::vector<Share>& shares);

 private:
  const Previous& previous_;
  const Layout& layout_;
  uint32_t key_ = UINT32_MAX;      // the one last asked for
  std::optional<uint32_t> known_;  // its number then
};

}  // namespace vescale_ckpt::plan
