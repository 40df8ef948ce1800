"""Names the rows of the engine's tables, which are 64-bit integers, for all that read or make such tables."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

PART_ROW = 4  #: of a rank's part of a save: item, dim (-1: the whole box), start, length
LOCATION_ROW = 4  #: of where a part was written: file, offset, length, CRC-32 (-1: none)
OBJECT_ROW = 5  #: of `LoadPlan.objects`: item, file, offset, length, CRC-32 (-1: none)

OBJECT, TENSOR, SHARD = range(3)  # kinds of items of an inventory (csrc/state/inventory.h)

#: More bytes than a tensor or a file has. Sizes and offsets are less, so that two of them add up in 64 bits.
MOST_BYTES = 1 << 62
#: Bytes, for the engine's limits where there is none: of pieces (tensors are not split), of files, of memory.
NO_LIMIT = MOST_BYTES


def words(table: bytes) -> memoryview:
    """The 64-bit integers of a table."""
    return memoryview(table).cast("q")


def in_first_file(placed: Sequence[int]) -> bytes:
    """Places in file 0, from offset, length and CRC-32 of each."""
    places = array("q", bytes(len(placed) // 3 * LOCATION_ROW * 8))
    for column in range(3):
        places[column + 1 :: LOCATION_ROW] = array("q", placed[column::3])
    return places.tobytes()


def int_table(rows: Sequence[int] = ()) -> array[int]:
    return array("q", rows)
