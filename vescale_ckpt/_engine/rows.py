"""Names the columns, dtypes, kinds and limits of the engine's tables, for modules that read or make them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from ..errors import CheckpointError
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

#: The code of each dtype in the tables, for every dtype that torch.save can store
DTYPE_CODES: dict[torch.dtype, int] = {
    getattr(torch, name): code for code, (name, _, _) in enumerate(_C.dtypes()) if hasattr(torch, name)
}

CODE_DTYPES: dict[int, torch.dtype] = {code: dtype for dtype, code in DTYPE_CODES.items()}


def dtype_code(dtype: torch.dtype, key: str) -> int:
    """Raises `CheckpointError` with the key for a dtype that torch itself has no way to store."""
    try:
        return DTYPE_CODES[dtype]
    except KeyError:
        raise CheckpointError(
            f"{key} has dtype {dtype}, which torch.save cannot store either: save it as a view of uint8",
            key=key,
            dtype=str(dtype),
        ) from None


def words(table: bytes) -> memoryview:
    """The 64-bit integers of a table."""
    return memoryview(table).cast("q")


def int_table(rows: Sequence[int] = ()) -> array[int]:
    return array("q", rows)
