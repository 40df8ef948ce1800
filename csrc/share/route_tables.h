// Translates tables of routes (routes.h) into those of the engine: buffer offsets and held rows become addresses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace vescale_ckpt::share {

// Makes the read table (read/reader.h) of RouteRound::staged. Throws Error (invalid, row) for rows that exceed the
// memory; the reader itself checks the chunk.
std::vector<int64_t> make_staging_table(std::span<const int64_t> staged, std::span<const std::byte> memory);

// Makes the copy table (io/box.h) of RouteRound::packs. Throws as above.
std::vector<int64_t> make_pack_table(std::span<const int64_t> packs, std::span<const std::byte> memory);

// The tensors that a rank holds for an export, by row of its local plan.
class HeldRows {
 public:
  // `table`: a write table (write/writer.h); `rows`: the local plan's row of each of its rows. Throws Error (invalid,
  // row).
  HeldRows(std::vector<int64_t> table, std::span<const int64_t> rows);
  HeldRows(const HeldRows&) = delete;  // held_ points into table_

  struct Held {
    int64_t dtype, address;
    std::span<const int64_t> sizes, strides;
    // The address of the first element of a box. Throws Error (invalid, row) if the box exceeds the tensor.
    int64_t address_of(std::span<const int64_t> offsets, std::span<const int64_t> sizes, int64_t row) const;
  };
  const Held* find(int64_t row) const;  // nullptr if the row is not held

 private:
  const std::vector<int64_t> table_;
  std::vector<Held> held_;
  std::vector<size_t> at_;  // for each row of the local plan, its index in held_
};

// Makes the table of boxes (write/placed_boxes.h) of those rows of RankRoutes::own that are held. Throws Error
// (invalid, row).
std::vector<int64_t> make_box_table(std::span<const int64_t> own, const HeldRows& held);

// Makes the copy table of RouteRound::places of an export. `memories`: rows of peer (-1: this rank), address, bytes.
// Throws Error (invalid, row), also for a tensor that is not held.
std::vector<int64_t> make_gather_table(std::span<const int64_t> places, const HeldRows& held,
                                       std::span<const int64_t> memories);

}  // namespace vescale_ckpt::share
