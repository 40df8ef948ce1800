// Says along which nodes a message travels that comes to all of them, each of which passes it on.
#pragma once

#include <cstdint>

namespace vescale_ckpt::share {

// One of two binary trees of `nodes` nodes, which are numbered from 0. A node with two children in one of them has none
// in the other, but for one or two nodes.
class RelayTree {
 public:
  RelayTree(bool mirrored, uint64_t nodes) : mirrored_(mirrored), nodes_(nodes) {}

  // How many messages bring something from one node to another.
  uint64_t distance(uint64_t from, uint64_t to) const {
    uint64_t left = place(from), right = place(to), steps = 0;
    for (; left != right; ++steps) (left > right ? left : right) /= 2;
    return steps;
  }

  // Calls `use` with each neighbour of a node.
  template <typename Use>
  void for_each_neighbour(uint64_t node, const Use& use) const {
    const uint64_t at = place(node);
    for (const uint64_t next : {at / 2, 2 * at, 2 * at + 1}) {
      if (next >= 1 && next <= nodes_) use(mirrored_ ? nodes_ - next : next - 1);
    }
  }

 private:
  // In a tree the children of place p are at 2 p and 2 p + 1; the root is at 1.
  uint64_t place(uint64_t node) const { return mirrored_ ? nodes_ - node : node + 1; }

  bool mirrored_;
  uint64_t nodes_;
};

}  // namespace vescale_ckpt::share
