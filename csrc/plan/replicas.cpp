#include "plan/replicas.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/crc32.h"
#include "base/error.h"

namespace vescale_ckpt::plan {
namespace {

constexpr uint32_t kNotShared = UINT32_MAX;

// Computes g of the header for a chunk.
uint64_t random_at(uint64_t chunk, uint32_t position, uint32_t holders) {
  if (position == 0 || position == holders) return 0;
  uint64_t mixed = chunk + position * 0x9E3779B97F4A7C15;  // splitmix64
  mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9;
  mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB;
  return mixed ^ mixed >> 31;
}

template <typename Value>
void append(std::vector<std::byte>& bytes, const Value& value) {
  const auto* begin = reinterpret_cast<const std::byte*>(&value);
  bytes.insert(bytes.end(), begin, begin + sizeof value);
}

template <typename Value>
Value value_at(std::span<const std::byte> bytes, size_t at) {
  Value value;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

}  // namespace

Replicas::Replicas(const Layout& layout, std::span<const std::span<const uint64_t>> hashes)
    : differs_(layout.class_of.size()) {
  if (hashes.empty()) return;
  uint64_t slots = 0;
  for (size_t rank = 0; rank < layout.block_of.size(); ++rank) {
    first_slot_.push_back(slots);
    slots += layout.block(rank).slot_items.size();
  }
  places_.resize(slots);
  std::vector<uint32_t> shared_chunk(slots, kNotShared);  // index among the class's chunks with several holders
  for (const Layout::Class& of : layout.classes) {
    uint32_t shared = 0;
    for (size_t chunk = 0; chunk < of.chunks; ++chunk) {
      const std::span<const Holder> holders = layout.holders_of(of, chunk);
      if (of.kind == state::ItemKind::object || holders.size() < 2) continue;
      for (uint32_t i = 0; i < holders.size(); ++i) {
        const uint64_t slot = first_slot_[holders[i].rank] + holders[i].slot;
        places_[slot] = {i, static_cast<uint32_t>(holders.size())};
        shared_chunk[slot] = shared;
      }
      ++shared;
    }
  }
  find_differences(layout, hashes, shared_chunk);
}

void Replicas::find_differences(const Layout& layout, std::span<const std::span<const uint64_t>> hashes,
                                std::span<const uint32_t> shared_chunk) {
  struct Seen {
    uint64_t hash = 0;
    uint32_t rank = 0;
  };
  if (hashes.size() != first_slot_.size()) throw Error::invalid("expected hashes of each rank");
  std::vector<uint32_t> shared_chunks(layout.classes.size());
  for (size_t rank = 0; rank < hashes.size(); ++rank) {
    const Layout::Block& block = layout.block(rank);
    if (!hashes[rank].empty() && hashes[rank].size() != block.slots.size()) {
      throw Error::invalid("rank " + std::to_string(rank) + " has not as many hashes as items");
    }
    for (size_t slot = 0; slot < block.slot_items.size(); ++slot) {
      const uint32_t number = shared_chunk[first_slot_[rank] + slot];
      if (number == kNotShared) continue;
      uint32_t& chunks = shared_chunks[layout.class_of[layout.keys(block)[block.slot_items[slot]]]];
      chunks = std::max(chunks, number + 1);
    }
  }
  std::vector<uint64_t> first_seen;  // first index of each key in `seen`
  uint64_t all = 0;
  for (const uint32_t of : layout.class_of) {
    first_seen.push_back(all);
    all += shared_chunks[of];
  }
  std::vector<Seen> seen(all);
  for (uint32_t rank = 0; rank < hashes.size(); ++rank) {
    const Layout::Block& block = layout.block(rank);
    const std::vector<uint32_t>& keys = layout.keys(block);
    for (size_t item = 0; item < hashes[rank].size(); ++item) {
      const uint64_t hash = hashes[rank][item];
      const uint32_t chunk = hash == 0 ? kNotShared : shared_chunk[first_slot_[rank] + block.slots[item]];
      if (chunk == kNotShared || differs_[keys[item]]) continue;
      Seen& first = seen[first_seen[keys[item]] + chunk];
      if (first.hash == 0) {
        first = {hash, rank};
      } else if (first.hash != hash) {
        differs_[keys[item]] = true;
        differences_.push_back({keys[item], first.rank, rank});
      }
    }
  }
  std::sort(differences_.begin(), differences_.end(),
            [](const Difference& a, const Difference& b) { return a.key < b.key; });
}

std::vector<std::byte> Replicas::holders(const Layout& layout, uint32_t rank) const {
  std::vector<std::byte> packed;
  if (places_.empty()) return packed;
  const Layout::Block& block = layout.block(rank);
  const std::vector<uint32_t>& keys = layout.keys(block);
  std::vector<HolderPlace> places = {{}};
  std::vector<uint16_t> of_items(block.slots.size());
  for (size_t item = 0; item < of_items.size(); ++item) {
    const HolderPlace& place = places_[first_slot_[rank] + block.slots[item]];
    if (place.holders < 2 || differs_[keys[item]]) continue;
    const auto found = std::find(places.begin() + 1, places.end(), place);
    if (found == places.end()) {
      if (places.size() > UINT16_MAX) continue;
      places.push_back(place);
      of_items[item] = static_cast<uint16_t>(places.size() - 1);
    } else {
      of_items[item] = static_cast<uint16_t>(found - places.begin());
    }
  }
  if (places.size() == 1) return packed;
  append(packed, static_cast<uint32_t>(places.size()));
  for (const HolderPlace& place : places) append(packed, place);
  for (const uint16_t place : of_items) append(packed, place);
  return packed;
}

std::vector<Summand> replica_summands(const state::Inventory& inventory, std::span<const std::byte> holders) {
  std::vector<Summand> summands;
  if (holders.empty()) return summands;
  const uint64_t places = holders.size() < 4 ? 0 : value_at<uint32_t>(holders, 0);
  const uint64_t head = 4 + places * sizeof(HolderPlace);
  if (holders.size() != head + inventory.size() * sizeof(uint16_t)) {
    throw Error::invalid("the holders are of another inventory");
  }
  std::vector<std::byte> chunk;
  for (uint32_t number = 0; number < inventory.size(); ++number) {
    const uint64_t at = value_at<uint16_t>(holders, head + number * sizeof(uint16_t));
    if (at == 0) continue;
    if (at >= places) throw Error::invalid("the holders are of another inventory");
    const auto place = value_at<HolderPlace>(holders, 4 + at * sizeof(HolderPlace));
    const state::Item item = inventory[number];
    if (item.bytes == 0) continue;
    const std::span<const std::byte> name = std::as_bytes(std::span(item.name));
    chunk.assign(name.begin(), name.end());
    for (const std::span<const int64_t> dims : {item.offset, item.size}) {
      const std::span<const std::byte> words = std::as_bytes(dims);
      chunk.insert(chunk.end(), words.begin(), words.end());
    }
    const uint64_t hash = crc32(0, chunk.data(), chunk.size());
    summands.push_back(
        {number, random_at(hash, place.position + 1, place.holders) - random_at(hash, place.position, place.holders)});
  }
  return summands;
}

ReplicaSum replica_sum(const state::StateTables& state, std::span<const std::byte> holders, const state::Sample& sample,
                       std::span<const uint64_t> factors) {
  const std::vector<Summand> summands = replica_summands(state.inventory, holders);
  std::vector<uint32_t> items;
  for (const Summand& summand : summands) items.push_back(summand.item);
  const std::vector<uint64_t> hashes = state::replica_hashes(state, items, sample, factors);
  ReplicaSum result;
  for (size_t i = 0; i < summands.size(); ++i) {
    result.sum += summands[i].factor * hashes[i];
    if (hashes[i] == state::kNotHashed) result.rest.push_back(summands[i]);
  }
  return result;
}

}  // namespace vescale_ckpt::plan
