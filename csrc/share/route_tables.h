// Translates tables of routes (routes.h) into the engine's: offsets become addresses in the rank's memory of the round,
// and what a rank holds is found where it is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace vescale_ckpt::share {

// The engine's read table (read/reader.h) for RouteRound::staged. Throws Error (invalid, row) for rows that leave
// the memory; the engine checks what concerns the chunk.
std::vector<int64_t> make_staging_table(std::span<const int64_t> staged, std::span<const std::byte> memory);

// The engine's copy table (io/box.h) for RouteRound::packs. Throws Error (invalid, row) in the same way.
std::vector<int64_t> make_pack_table(std::span<const int64_t> packs, std::span<const std::byte> memory);

// What a rank holds for an export, by the rows of its part of the plan. A view of the table.
class HeldRows {
 public:
  // `table`: to write (write/writer.h); `rows`: of the part, for each of its rows. Throws Error (invalid, row).
  HeldRows(std::span<const int64_t> table, std::span<const int64_t> rows);

  struct Held {
    int64_t dtype, address;
    std::span<const int64_t> sizes, strides;
    // Of the first element of a part of the box. Throws Error (invalid, row) if it leaves the box.
    int64_t address_of(std::span<const int64_t> offsets, std::span<const int64_t> sizes, int64_t row) const;
  };
  const Held* find(int64_t row) const;  // null if it is not in the table

 private:
  std::vector<Held> held_;
  std::vector<size_t> at_;  // one for each row of the part: its index in held_
};

// Boxes in memory (write/placed_boxes.h) for those of RankRoutes::own, or rows of the same form, that are held. Throws
// Error (invalid, row).
std::vector<int64_t> make_box_table(std::span<const int64_t> own, const HeldRows& held);

// The engine's copy table for RouteRound::places of an export. `memories`: rows of peer (-1: this rank), address,
// bytes. Throws Error (invalid, row), also for what is not held.
std::vector<int64_t> make_gather_table(std::span<const int64_t> places, const HeldRows& held,
                                       std::span<const int64_t> memories);

}  // namespace vescale_ckpt::share
