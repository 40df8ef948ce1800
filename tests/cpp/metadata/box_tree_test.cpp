// Overlaps of boxes: right in every layout, and no dearer than what they find.
#include "metadata/box_tree.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "metadata/catalogs.h"

namespace vescale_ckpt::metadata {
namespace {

std::vector<int64_t> nodes_of(const std::vector<BoxOf>& boxes, size_t ndim) {
  const BoxTree tree(boxes.size(), ndim);
  std::vector<int64_t> nodes;
  for (const BoxOf& box : boxes) {
    nodes.insert(nodes.end(), box.offset.begin(), box.offset.end());
    nodes.insert(nodes.end(), box.size.begin(), box.size.end());
  }
  nodes.resize(tree.words(), -1);
  tree.fill(nodes);
  return nodes;
}

struct Cost {
  uint64_t found = 0, visited = 0;
};

// `found` gets every pair (stored, wanted).
template <typename Found>
Cost query(const std::vector<BoxOf>& stored, const std::vector<BoxOf>& wanted, size_t ndim, const Found& found) {
  const BoxTree tree(stored.size(), ndim);
  const std::vector<int64_t> nodes = nodes_of(stored, ndim);
  Cost cost;
  for (size_t i = 0; i < wanted.size(); ++i) {
    cost.visited += tree.overlaps(wanted[i].offset, wanted[i].size, nodes, [&](uint64_t box, const int64_t*) {
      ++cost.found;
      found(box, i);
    });
  }
  return cost;
}

bool meet(const BoxOf& a, const BoxOf& b) {
  for (size_t dim = 0; dim < a.offset.size(); ++dim) {
    if (std::max(a.offset[dim], b.offset[dim]) >= std::min(a.offset[dim] + a.size[dim], b.offset[dim] + b.size[dim])) {
      return false;
    }
  }
  return true;
}

using Pairs = std::vector<std::pair<uint64_t, size_t>>;

Pairs by_tree(const std::vector<BoxOf>& stored, const std::vector<BoxOf>& wanted, size_t ndim) {
  Pairs pairs;
  query(stored, wanted, ndim, [&](uint64_t box, size_t i) { pairs.emplace_back(box, i); });
  return pairs;
}

Pairs by_looking_at_all(const std::vector<BoxOf>& stored, const std::vector<BoxOf>& wanted) {
  Pairs pairs;
  for (size_t i = 0; i < wanted.size(); ++i) {
    for (size_t box = 0; box < stored.size(); ++box) {
      if (meet(stored[box], wanted[i])) pairs.emplace_back(box, i);
    }
  }
  return pairs;
}

TEST(BoxTree, FindsWhatLookingAtAllFinds) {
  std::mt19937 random(7);
  for (int round = 0; round < 300; ++round) {
    const size_t ndim = 1 + random() % 4;
    const auto boxes = [&](size_t count) {
      std::vector<BoxOf> result(count, {Dims(ndim), Dims(ndim)});
      for (BoxOf& box : result) {
        for (size_t dim = 0; dim < ndim; ++dim) {
          box.offset[dim] = random() % 20;
          box.size[dim] = random() % 8;  // some empty
        }
      }
      return result;
    };
    const auto stored = boxes(random() % 400), wanted = boxes(5);
    ASSERT_EQ(by_tree(stored, wanted, ndim), by_looking_at_all(stored, wanted)) << "round " << round;
  }
}

TEST(BoxTree, WithoutDimensionsAllOverlap) {
  const std::vector<BoxOf> scalar(1), none;
  EXPECT_EQ(by_tree(scalar, scalar, 0), (Pairs{{0, 0}}));
  EXPECT_EQ(by_tree(none, scalar, 0), Pairs{});
}

TEST(BoxTree, NodesThatLieCauseNoMoreThanOneLookEach) {
  constexpr size_t kBoxes = 5000;
  const BoxTree tree(kBoxes, 2);
  std::mt19937_64 random(3);
  std::vector<int64_t> nodes(tree.words());
  for (int64_t& word : nodes) word = static_cast<int64_t>(random());  // sums of them overflow
  const Dims offset{0, 0}, size{INT64_MAX, INT64_MAX};
  const uint64_t visited = tree.overlaps(offset, size, nodes, [](uint64_t, const int64_t*) {});
  EXPECT_LE(visited, tree.nodes());
}

struct Layouts {
  const char* name;
  Dims stored, wanted;  // parts along each dimension
};

class Cuts : public ::testing::TestWithParam<Layouts> {};

// What is looked at for a box that is found, or for one that is wanted, are some siblings on each level. With ten
// thousand boxes on either side a look at all of them would be a hundred million.
TEST_P(Cuts, CostTheLogarithmAndWhatTheyFind) {
  const Dims shape{40000, 30000};
  const auto stored = grid(shape, GetParam().stored), wanted = grid(shape, GetParam().wanted);
  const Cost cost = query(stored, wanted, 2, [](uint64_t, size_t) {});
  EXPECT_GE(cost.found, std::max(stored.size(), wanted.size()));
  constexpr uint64_t kLevels = 4;
  EXPECT_LE(cost.visited, kLevels * BoxTree::kFanOut * (wanted.size() + cost.found));
}

INSTANTIATE_TEST_SUITE_P(Layouts, Cuts,
                         ::testing::Values(Layouts{"rows_to_rows", {10000, 1}, {9999, 1}},
                                           Layouts{"columns_to_columns", {1, 10000}, {1, 9999}},
                                           Layouts{"rows_to_columns", {1000, 1}, {1, 1000}},
                                           Layouts{"few_rows_to_columns", {8, 1}, {1, 10000}},
                                           Layouts{"columns_to_few_rows", {1, 10000}, {8, 1}},
                                           Layouts{"grid_to_grid", {100, 100}, {99, 101}},
                                           Layouts{"grid_to_rows", {100, 100}, {9999, 1}},
                                           Layouts{"rows_to_grid", {9999, 1}, {100, 100}},
                                           Layouts{"grid_to_columns", {100, 100}, {1, 9999}}),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace vescale_ckpt::metadata
