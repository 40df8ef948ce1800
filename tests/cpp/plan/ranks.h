// Ranks of a job as the tests describe them, and what a plan makes of them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "format/torch_record.h"
#include "plan/global_plan.h"
#include "state/inventory.h"
#include "tensors.h"

namespace vescale_ckpt::plan {

using Dims = std::vector<int64_t>;

class Ranks {
 public:
  explicit Ranks(size_t count, size_t ranks_a_node = SIZE_MAX) : builders_(count), ranks_a_node_(ranks_a_node) {}

  size_t count() const { return builders_.size(); }

  void shard(size_t rank, std::string_view name, const Dims& shape, const Dims& offset, const Dims& size,
             std::string_view dtype = "float32") {
    add(rank, name, state::ItemKind::shard, shape, offset, size, dtype);
  }
  void tensor(size_t rank, std::string_view name, const Dims& shape, std::string_view dtype = "float32") {
    add(rank, name, state::ItemKind::tensor, shape, Dims(shape.size()), shape, dtype);
  }
  void replicated(std::string_view name, const Dims& shape, std::string_view dtype = "float32") {
    for (size_t rank = 0; rank < count(); ++rank) tensor(rank, name, shape, dtype);
  }
  void object(size_t rank, std::string_view name) {
    state::Item item;
    item.name = name;
    builders_[rank].add(item);
  }
  state::InventoryBuilder& builder(size_t rank) { return builders_[rank]; }

  std::vector<std::vector<std::byte>> packed() const {
    std::vector<std::vector<std::byte>> packed;
    for (size_t rank = 0; rank < count(); ++rank) {
      packed.push_back(builders_[rank].pack(static_cast<int64_t>(rank / ranks_a_node_)));
    }
    return packed;
  }
  // `hashes`: of each rank's items.
  GlobalPlan plan(const PlanOptions& options = {}, const std::vector<std::vector<uint64_t>>& hashes = {}) const {
    const std::vector<std::vector<std::byte>> inventories = packed();
    std::vector<state::InventoryParts> views;
    for (const std::vector<std::byte>& inventory : inventories) views.push_back({inventory});
    return GlobalPlan(views, options, std::vector<std::span<const uint64_t>>(hashes.begin(), hashes.end()));
  }

 private:
  void add(size_t rank, std::string_view name, state::ItemKind kind, const Dims& shape, const Dims& offset,
           const Dims& size, std::string_view dtype) {
    state::Item item{name, kind, static_cast<uint8_t>(dtype_code(dtype)), 0, 0, shape, offset, size};
    item.bytes = format::dtypes()[item.dtype].item_bytes;
    for (const int64_t length : size) item.bytes *= static_cast<uint64_t>(length);
    builders_[rank].add(item);
  }

  std::vector<state::InventoryBuilder> builders_;
  size_t ranks_a_node_;
};

// What planning says is wrong with them.
inline std::string refusal(const Ranks& ranks) {
  try {
    ranks.plan();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind, Error::Kind::invalid);
    return error.what();
  }
  return "nothing is wrong";
}

inline double max_over_mean(const GlobalPlan& plan) {
  const metadata::Catalog catalog = plan.catalog();
  std::vector<double> bytes(plan.ranks());
  for (const metadata::Catalog::Key& key : catalog.keys) {
    for (uint64_t i = key.first_chunk; i < key.first_chunk + key.chunks; ++i) {
      const metadata::Catalog::Chunk& chunk = catalog.chunks[i];
      bytes[chunk.writer] +=
          static_cast<double>(format::tensor_bytes(format::dtypes()[key.dtype], catalog.size(key, chunk)));
    }
  }
  return *std::ranges::max_element(bytes) * plan.ranks() / std::accumulate(bytes.begin(), bytes.end(), 0.0);
}

// "name (offset) (size)" of each chunk -> who writes it.
inline std::map<std::string, uint32_t> owners(const metadata::Catalog& catalog) {
  const auto text = [](std::span<const int64_t> dims) {
    std::string result;
    for (const int64_t value : dims) result += (result.empty() ? "" : ",") + std::to_string(value);
    return " (" + result + ")";
  };
  std::map<std::string, uint32_t> result;
  for (const metadata::Catalog::Key& key : catalog.keys) {
    for (uint64_t i = key.first_chunk; i < key.first_chunk + key.chunks; ++i) {
      const metadata::Catalog::Chunk& chunk = catalog.chunks[i];
      const bool fresh = result
                             .emplace(std::string(catalog.name(key)) + text(catalog.offset(key, chunk)) +
                                          text(catalog.size(key, chunk)),
                                      chunk.writer)
                             .second;
      EXPECT_TRUE(fresh);
    }
  }
  return result;
}

using Owners = std::map<std::string, uint32_t>;

}  // namespace vescale_ckpt::plan
