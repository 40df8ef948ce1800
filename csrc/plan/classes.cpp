#include "plan/layout.h"

#include <array>
#include <string_view>
#include <unordered_map>

#include "format/torch_record.h"

namespace vescale_ckpt::plan {
namespace {

constexpr uint32_t kNone = UINT32_MAX;

// The key of a map: two 64-bit numbers.
using Pair = std::array<uint64_t, 2>;

struct PairHash {
  size_t operator()(const Pair& pair) const { return pair[0] * 0x9E3779B97F4A7C15 ^ pair[1]; }
};

using Numbers = std::unordered_map<Pair, uint32_t, PairHash>;

uint32_t number_of(Numbers& numbers, const Pair& pair) {
  return numbers.try_emplace(pair, static_cast<uint32_t>(numbers.size())).first->second;
}

struct FirstItem {
  uint32_t rank, item;
};

// Returns the first item of each key. The first key of a class gives the traits of the class.
using FirstItems = std::vector<FirstItem>;

FirstItems number_keys(std::span<const state::Inventory> ranks, std::span<const uint32_t> names,
                       std::span<const uint32_t> numbers, Layout& layout) {
  FirstItems first_items;
  Numbers blocks;
  layout.block_of.reserve(ranks.size());
  for (uint32_t rank = 0; rank < ranks.size(); ++rank) {
    const state::Inventory& inventory = ranks[rank];
    if (names[rank] == layout.key_lists.size()) {
      std::vector<uint32_t>& keys = layout.key_lists.emplace_back();
      keys.reserve(inventory.size());
      for (uint32_t i = 0; i < inventory.size(); ++i) {
        const auto [key, is_new] = layout.names.add(inventory[i].name);
        if (is_new) first_items.push_back({rank, i});
        keys.push_back(key);
      }
    }
    const uint32_t block = number_of(blocks, {names[rank], numbers[rank]});
    if (block == layout.blocks.size()) layout.blocks.push_back({names[rank]});
    ++layout.blocks[block].ranks;
    layout.block_of.push_back(block);
  }
  return first_items;
}

// Keys belong to one class if they have equal row numbers in the same blocks. Each block splits the classes of the
// blocks before it.
void part_keys(std::span<const state::Inventory> ranks, Layout& layout) {
  std::vector<uint32_t>& class_of = layout.class_of;
  class_of.assign(layout.names.size(), 0);
  uint32_t next = 1, block = 0;
  Numbers parted;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    if (layout.block_of[rank] != block) continue;  // only the first rank of a block counts
    ++block;
    const std::vector<uint32_t>& keys = layout.keys(layout.block(rank));
    const std::span<const uint32_t> numbers = ranks[rank].numbers();
    parted.clear();
    for (size_t i = 0; i < keys.size(); ++i) {
      uint32_t& of_key = class_of[keys[i]];
      of_key = next + number_of(parted, {of_key, numbers[i]});
    }
    next += static_cast<uint32_t>(parted.size());
  }
  std::vector<uint32_t> renumbered(next, kNone);
  for (uint32_t key = 0; key < class_of.size(); ++key) {
    uint32_t& number = renumbered[class_of[key]];
    if (number == kNone) {
      number = static_cast<uint32_t>(layout.classes.size());
      layout.classes.emplace_back().first_key = key;
    }
    class_of[key] = number;
    ++layout.classes[number].keys;
  }
}

void describe_classes(std::span<const state::Inventory> ranks, const FirstItems& first_items, Layout& layout) {
  for (Layout::Class& of : layout.classes) {
    const FirstItem first = first_items[of.first_key];
    const state::Item item = ranks[first.rank][first.item];
    of.kind = item.kind;
    of.dtype = item.dtype;
    of.flags = item.flags;
    of.ndim = static_cast<uint32_t>(item.shape.size());
    of.shape = layout.shapes.size();
    of.bytes = item.kind == state::ItemKind::object ? 0 : format::dtypes()[item.dtype].item_bytes;
    layout.shapes.insert(layout.shapes.end(), item.shape.begin(), item.shape.end());
  }
}

// Orders slots class after class, by the items of their first keys; several slots of one class by their items.
void number_slots(Layout& layout) {
  std::vector<uint32_t> count(layout.classes.size()), first_slot(layout.classes.size()), seen(layout.class_of.size());
  for (Layout::Block& block : layout.blocks) {
    const std::vector<uint32_t>& keys = layout.keys(block);
    const auto is_first = [&](uint32_t key) { return layout.classes[layout.class_of[key]].first_key == key; };
    for (const uint32_t key : keys) count[layout.class_of[key]] += is_first(key);
    uint32_t slots = 0;
    for (const uint32_t key : keys) {
      const uint32_t of = layout.class_of[key];
      if (count[of] == 0) continue;  // its slots are known
      first_slot[of] = slots;
      slots += count[of];
      count[of] = 0;
    }
    block.slot_items.resize(slots);
    block.slots.reserve(keys.size());
    for (uint32_t i = 0; i < keys.size(); ++i) {
      const uint32_t slot = first_slot[layout.class_of[keys[i]]] + seen[keys[i]]++;
      block.slots.push_back(slot);
      if (is_first(keys[i])) block.slot_items[slot] = i;
    }
    for (const uint32_t key : keys) seen[key] = 0;
  }
}

// Returns a number for each of `parts`; equal bytes get equal numbers, in the order of first appearance. Bytes at one
// address are read once.
std::vector<uint32_t> number_contents(std::span<const std::span<const std::byte>> parts) {
  Numbers places;
  std::unordered_map<std::string_view, uint32_t> numbers;
  std::vector<uint32_t> of_place, result;
  for (const std::span<const std::byte> part : parts) {
    const uint32_t place = number_of(places, {reinterpret_cast<uintptr_t>(part.data()), part.size()});
    if (place == of_place.size()) {
      const std::string_view bytes(reinterpret_cast<const char*>(part.data()), part.size());
      of_place.push_back(numbers.try_emplace(bytes, static_cast<uint32_t>(numbers.size())).first->second);
    }
    result.push_back(of_place[place]);
  }
  return result;
}

}  // namespace

void find_classes(std::span<const state::Inventory> ranks, Layout& layout) {
  std::vector<std::span<const std::byte>> names, numbers;
  for (const state::Inventory& inventory : ranks) {
    names.push_back(inventory.parts().names);
    numbers.push_back(inventory.parts().numbers);
  }
  const FirstItems first_items = number_keys(ranks, number_contents(names), number_contents(numbers), layout);
  part_keys(ranks, layout);
  describe_classes(ranks, first_items, layout);
  number_slots(layout);
}

}  // namespace vescale_ckpt::plan
