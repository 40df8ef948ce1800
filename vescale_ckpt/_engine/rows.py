"""Names the columns, dtypes, kinds and limits of the engine's tables, for modules that read or make them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from . import _C

# Integers in a row:
PLAN_ROW = 4  #: a row of a local plan: item, dim (-1: the whole chunk), start, length
LOCATION_ROW = 4  #: words of a written row's location: file, offset, length, CRC-32 (-1: none)
OBJECT_ROW = 5  #: words of a row of `LoadPlan.objects`: item, file, offset, length, CRC-32 (-1: none)

OBJECT, TENSOR, SHARD = range(3)  # kinds of items of an inventory (csrc/state/inventory.h)

InventoryParts = tuple[bytes, bytes, bytes, bytes]  #: `_C.inventory_parts`: ranks have some of them in common
Inventory = bytes | InventoryParts  #: packed items, whole or in parts

#: All sizes and offsets of tensors and files are below it, so that the sum of two fits in 64 bits.
MOST_BYTES = 1 << 62
#: Bytes, for an option of the engine that should not limit anything: pieces of tensors, files, memory.
NO_LIMIT = MOST_BYTES
#: Planning makes no piece of a chunk that is smaller.
LEAST_PIECE_BYTES = 1 << 20

DTYPE_NAMES = [name for name, _, _ in _C.dtypes()]  #: torch's, by dtype code
CODES = {name: code for code, name in enumerate(DTYPE_NAMES)}
ITEM_BYTES = [size for _, _, size in _C.dtypes()]  #: bytes of an element, by dtype code


def words(table: bytes) -> memoryview:
    """The 64-bit integers of a table."""
    return memoryview(table).cast("q")


def int_table(rows: Sequence[int] = ()) -> array[int]:
    return array("q", rows)
