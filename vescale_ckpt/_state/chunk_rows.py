"""Packs chunks of tensors as rows of the engine's inventories, and finds chunks that overlap. Needs no torch."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_REQUIRES_GRAD, _UNCUT = 1, 2  # flags (csrc/state/inventory.h)


class ShardChunk(NamedTuple):
    """A chunk of a tensor. Each field counts elements in each dimension."""

    offset: tuple[int, ...]  #: the first element in the whole tensor
    size: tuple[int, ...]
    local_offset: tuple[int, ...]  #: the first element in the local tensor


def packed_row(
    kind: int,
    code: int,
    requires_grad: bool,
    item_bytes: int,
    chunk: ShardChunk,
    shape: Iterable[int],
    *,
    uncut: bool = False,
) -> bytes:
    """Packs an item's row of an inventory. `uncut`: no plan may cut its chunk."""
    flags = (_REQUIRES_GRAD if requires_grad else 0) | (_UNCUT if uncut else 0)
    total = item_bytes
    for size in chunk.size:
        total *= size
    head = kind | code << 8 | flags << 16 | len(chunk.size) << 32
    words = (head, total, *shape, *chunk.offset, *chunk.size)
    return struct.pack(f"{len(words)}q", *words)


def overlapping_chunk(chunks: Sequence[tuple[Sequence[int], Sequence[int]]]) -> int | None:
    """Returns the index of a chunk that shares an element with another one; None if there is none.

    `chunks`: offset and size of each chunk of one tensor; a chunk without elements must be alone. The chunks are swept
    along the dimension with the most distinct offsets.
    """
    if len(chunks) < 2:
        return None
    dimensions = len(chunks[0][0])
    if dimensions == 0:
        return 1
    sweep = max(range(dimensions), key=lambda dim: len({offset[dim] for offset, _ in chunks}))
    active: list[int] = []
    for index in sorted(range(len(chunks)), key=lambda index: chunks[index][0][sweep]):
        offset, size = chunks[index]
        active = [other for other in active if chunks[other][0][sweep] + chunks[other][1][sweep] > offset[sweep]]
        for other in active:
            if all(a < b + m and b < a + n for a, n, b, m in zip(offset, size, *chunks[other], strict=True)):
                return index
        active.append(index)
    return None
