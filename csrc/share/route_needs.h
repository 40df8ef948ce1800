// What ranks need of stored records: the rows of their tables, those of replicas once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "share/routes.h"

namespace vescale_ckpt::share {

// Ranks whose tables of reads are equal: replicas. They are planned once.
struct Replicas {
  std::vector<uint32_t> ranks;  // rising
};

// One row of a rank's reads (metadata/load_plan.h), with its rank and the number of its file over all ranks. A view.
struct Need {
  static constexpr size_t kHead = 7;

  uint32_t rank = 0;  // the lowest of its replicas; after each_for_itself one of them
  uint32_t file = 0;  // numbered over all ranks
  std::span<const int64_t> row;
  const Replicas* replicas = nullptr;

  int64_t item() const { return row[0]; }
  int64_t record_offset() const { return row[2]; }
  int64_t record_length() const { return row[3]; }
  int64_t crc() const { return row[4]; }
  int64_t dtype() const { return row[5]; }
  size_t dims() const { return static_cast<size_t>(row[6]); }
  std::span<const int64_t> chunk() const { return list(0); }
  std::span<const int64_t> box_offset() const { return list(1); }
  std::span<const int64_t> box_size() const { return list(2); }
  std::span<const int64_t> target() const { return list(3); }

 private:
  std::span<const int64_t> list(size_t number) const { return row.subspan(kHead + number * dims(), dims()); }
};

// The rows of some ranks in the order of files, those of replicas once.
struct Needs {
  std::vector<Replicas> replicas;
  std::vector<Need> rows;
};

uint64_t item_bytes(const Need& need);

// The ranks `members` in groups that have equal tables, by their lowest rank.
std::vector<Replicas> replicas_among(std::span<const RankReads> ranks, std::span<const uint32_t> members);

// The rows of `members`, checked. `numbered`: their files have the same numbers on all ranks, and no names. Throws
// Error (invalid, with the rank as item).
Needs needs_of(std::span<const RankReads> ranks, std::span<const uint32_t> members, bool numbered = false);

}  // namespace vescale_ckpt::share
