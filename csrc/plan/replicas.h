// Finds which ranks hold the same chunk, and whether their values differ.
//
// At each save the holders of a chunk add summands to one sum over all ranks, which is 0 if all have the same hash. The
// summand of holder i of n is h * (g(i + 1) - g(i)). h is a hash of its elements; g is random, but 0 at 0 and at n.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "plan/layout.h"
#include "state/inventory.h"
#include "state/replica_hash.h"
#include "state/tables.h"

namespace vescale_ckpt::plan {

// A rank among the holders of a chunk.
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
  // `hashes`: a hash of each item of each rank, or 0 if it has none; empty: nothing is compared. Throws Error (invalid)
  // if a rank has not as many hashes as items.
  Replicas(const Layout& layout, std::span<const std::span<const uint64_t>> hashes);

  // Returns one difference for each key that differs, in the order of the keys.
  const std::vector<Difference>& differences() const { return differences_; }
  const std::vector<bool>& differs() const { return differs_; }  // one for each key

  // Returns the table for `replica_summands`: uint32 count of places, places, and the index of the place of each item
  // of the rank, as uint16. An item has place 0 if it has one holder, or if its key differs, because differences are
  // reported once. Empty if all items have place 0, and if nothing is compared.
  std::vector<std::byte> holders(const Layout& layout, uint32_t rank) const;

 private:
  void find_differences(const Layout& layout, std::span<const std::span<const uint64_t>> hashes,
                        std::span<const uint32_t> shared_chunk);

  std::vector<uint64_t> first_slot_;  // start of each rank in places_
  std::vector<HolderPlace> places_;   // place of each slot, rank after rank
  std::vector<Difference> differences_;
  std::vector<bool> differs_;
};

struct Summand {
  uint32_t item;
  uint64_t factor;  // it multiplies the item's hash
};

// Returns the items of an inventory that several ranks hold. Throws Error (invalid) if `holders` is for another
// inventory.
std::vector<Summand> replica_summands(const state::Inventory& inventory, std::span<const std::byte> holders);

struct ReplicaSum {
  uint64_t sum = 0;           // of the summands that the engine hashes
  std::vector<Summand> rest;  // the others
};

// Adds up a rank's summands. Throws Error (invalid) as `replica_summands` and `state::replica_hashes`.
ReplicaSum replica_sum(const state::StateTables& state, std::span<const std::byte> holders, const state::Sample& sample,
                       std::span<const uint64_t> factors);

}  // namespace vescale_ckpt::plan
