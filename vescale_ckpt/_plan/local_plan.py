"""`LocalPlan` is what one rank writes in a save."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice
from math import prod
from typing import Any

import torch

from .._engine import _C
from .._engine.rows import ITEM_BYTES, OBJECT, PLAN_ROW, words
from .._state.state import State
from .._state.tensor_table import NOT_READY, narrowed
from .._state.watch import changed_meanwhile


class LocalPlan:
    """Items of a rank's inventory, or pieces of them: one row each, and the rows of objects last.

    Args:
        table: `PLAN_ROW` integers for each row.
    """

    def __init__(self, state: State, table: bytes) -> None:
        self.state = state
        self.table = table
        self._numbers = words(table)

    def __len__(self) -> int:
        return len(self._numbers) // PLAN_ROW

    def rows(self) -> Iterator[tuple[int, int, int, int]]:
        """Item, dimension, start and length of each row: a piece along that dimension; -1: the whole item."""
        return struct.iter_unpack("<4q", self.table)

    def item(self, row: int) -> int:
        return self._numbers[row * PLAN_ROW]

    def key(self, row: int) -> str:
        return self.state.names[self._numbers[row * PLAN_ROW]]

    @cached_property
    def tensors(self) -> range:
        """The rows of tensors."""
        kinds = _C.inventory_kinds(self.state.inventory)
        if OBJECT not in kinds:
            return range(len(self))
        return range(sum(kinds[item] != OBJECT for item in self._numbers[::PLAN_ROW]))

    def objects(self) -> dict[str, Any]:
        """The objects by their keys, in the order of their rows."""
        names, values = self.state.names, self.state.objects
        keys = (names[item] for item in self._numbers[len(self.tensors) * PLAN_ROW :: PLAN_ROW])
        return {key: values[key] for key in keys}

    def tensor(self, row: int) -> torch.Tensor:
        """The tensor that a row writes, or a view of a part of one."""
        item, dim, start, length = self._numbers[row * PLAN_ROW : (row + 1) * PLAN_ROW]
        tensor, offset = self.state.source(item)
        size = self.state.items[item][7]
        if dim >= 0:
            offset, size = cut(offset, size, dim, start, length)
        return narrowed(tensor, offset, size)

    def check_unchanged(self) -> None:
        """Raises `CheckpointError` with the key of a tensor that changed after the state was described."""
        if not (changed := self.state.changed()):
            return
        for row in self.tensors:
            if self.state.tensor_index(self.item(row)) in changed:
                raise changed_meanwhile(self.key(row))

    def write_table(self, rows: Sequence[int] | None = None) -> bytes:
        """Returns the engine's table of all tensors in the plan, or of `rows`. The engine must be able to read all of
        them in place."""
        table, devices = self.copy_table(rows)
        assert devices == b"\xff" * len(devices), "a tensor is not in host memory"
        return table

    def copy_table(self, rows: Sequence[int] | None = None) -> tuple[bytes, bytes]:
        """Returns the same for a snapshot of tensors in host memory or on CUDA devices, and the device of each row (-1:
        the host)."""
        return self.state.for_engine.copy_table(self._part(rows))

    def ready_rows(self) -> bytes:
        """Returns the flag of `TensorReads.ready` for each row of a tensor."""
        return self.state.for_engine.ready_rows(self._part(None))

    def _part(self, rows: Sequence[int] | None) -> bytes:
        """The table of these rows; None: of all tensors."""
        rows = self.tensors if rows is None else rows
        if isinstance(rows, range):
            return self.table[rows.start * PLAN_ROW * 8 : rows.stop * PLAN_ROW * 8]
        return b"".join([self._numbers[row * PLAN_ROW : (row + 1) * PLAN_ROW] for row in rows])

    def body_bytes(self) -> bytes:
        """Returns the bytes of each tensor in the plan, as 64-bit integers."""
        if NOT_READY not in self.state.ready:
            return _C.body_bytes(self.copy_table()[0])
        items, sizes = self.state.items, array("q")
        for item, dim, _, length in islice(self.rows(), len(self.tensors)):
            _, _, dtype, _, _, _, _, size = items[item]
            elements = prod(size) if dim < 0 else prod(size[:dim]) * length * prod(size[dim + 1 :])
            sizes.append(elements * ITEM_BYTES[dtype])
        return sizes.tobytes()


def cut(
    offset: tuple[int, ...], size: tuple[int, ...], dim: int, start: int, length: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The offset and the size of a piece of a chunk."""
    return (*offset[:dim], offset[dim] + start, *offset[dim + 1 :]), (*size[:dim], length, *size[dim + 1 :])
