// Which ranks hold the same box, and whether they say the same of its values.
//
// At each save the holders of a box add summands to one sum over all ranks, which is 0 if all have the same hash. The
// summand of holder i of n is h * (g(i + 1) - g(i)). h is a hash of its elements; g is random, but 0 at 0 and at n.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "plan/layout.h"
#include "state/inventory.h"

namespace vescale_ckpt::plan {

// A rank among the holders of a box.
struct HolderPlace {
  uint32_t position = 0, holders = 1;

  bool operator==(const HolderPlace&) const = default;
};

struct Difference {
  uint32_t key;
  uint32_t one, other;  // the first two ranks that differ
};

class Replicas {
 public:
  Replicas() = default;
  // `hashes`: of each rank, for each of its items a hash, or 0 where it has none; empty: nothing is compared. Throws
  // Error (invalid) for ranks that have not as many hashes as items.
  Replicas(const Layout& layout, std::span<const std::span<const uint64_t>> hashes);

  // One for each key that differs, in the order of the keys.
  const std::vector<Difference>& differences() const { return differences_; }

  // For `replica_summands`: uint32 count of places, places, and the place of each item of the rank: uint8, or uint16 if
  // a byte is too small. Items of one holder have place 0, and those of keys that differ: that was told. Empty if all
  // have, and if nothing is compared.
  std::vector<std::byte> holders(const Layout& layout, uint32_t rank) const;

 private:
  void find_differences(const Layout& layout, std::span<const std::span<const uint64_t>> hashes,
                        std::span<const uint32_t> shared_box);

  std::vector<uint64_t> first_slot_;  // of each rank, in places_
  std::vector<HolderPlace> places_;   // of each slot, rank after rank
  std::vector<Difference> differences_;
  std::vector<bool> differs_;  // each key
};

struct Summand {
  uint32_t item;
  uint64_t factor;  // of the item's hash
};

// The items of an inventory that several ranks hold. Throws Error (invalid) if `holders` is not of this inventory.
std::vector<Summand> replica_summands(const state::Inventory& inventory, std::span<const std::byte> holders);

}  // namespace vescale_ckpt::plan
