"""Describes a rank's state for planning: an inventory of boxes and objects, and where in memory each box lies.

The inventory (csrc/state/inventory.h) is bytes without a tensor in sight, and the same bytes as long as the state has
the same keys, dtypes, shapes and shards; sources, table and tensors stay on the rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .._engine import _C
from .._engine.gc import gc_paused
from .._engine.torch_private import storage_identity, versions
from .inventory_rows import Items, make_items
from .local_state import LocalState, look
from .tensor_table import ON_HOST, ready_tensors_and_storages


@dataclass(frozen=True)
class Description:
    """What a rank holds, or wants filled."""

    inventory: bytes  #: an item for each box of a tensor and each object, in the order of the keys
    names: list[str]  #: the key of each item
    sources: bytes  #: for each item 64-bit integers: tensor, dimensions n, n offsets in it; an object: -1, 0
    tensors: list[torch.Tensor]  #: what lies on this rank; `table` is true as long as these live unchanged
    table: bytes  #: `tensor_table` of them
    ready: bytes  #: for each, what `ready_tensors` says: whether the engine, or a snapshot, may use its memory as it is
    objects: dict[str, Any]  #: values of the items that are no tensors
    other: dict[str, Any]  #: values that describe themselves to DCP or are tensors of a class of their own: no items
    wrappers: dict[int, DTensor]  #: by number of the tensor that it has here: those count changes for themselves
    storages: list[torch.UntypedStorage]  #: that tensors in memory lie in, held: one that is given another leaves it
    storage_bytes: list[int]
    versions: list[int] | None = None  #: of a state that is saved: of `tensors`, then of `wrappers`

    @property
    def all_ready(self) -> bool:
        """Whether the engine may use the memory of all tensors as it is."""
        return self.ready.count(ON_HOST) == len(self.ready)

    @cached_property
    def items(self) -> list[tuple[Any, ...]]:
        """The inventory, unpacked: name, kind, dtype code, requires_grad, bytes, shape, offset, size."""
        return _C.inventory_items(self.inventory)

    @cached_property
    def _source_rows(self) -> list[tuple[int, ...]]:
        numbers = memoryview(self.sources).cast("q").tolist()
        rows, at = [], 0
        while at < len(numbers):
            end = at + 2 + numbers[at + 1]
            rows.append((numbers[at], *numbers[at + 2 : end]))
            at = end
        return rows

    def tensor_number(self, item: int) -> int:
        """Which of `tensors` an item of a tensor lies in."""
        return self._source_rows[item][0]

    def watched(self) -> Description:
        """The same, which tells what is changed from now on."""
        return replace(self, versions=versions([*self.tensors, *self.wrappers.values()]))

    def changed(self) -> set[int]:
        """Which of `tensors` were changed since, or lost their memory."""
        if self.versions is None:
            return set()
        now = versions([*self.tensors, *self.wrappers.values()])
        sizes = list(map(torch.UntypedStorage.nbytes, self.storages))
        if now == self.versions and sizes == self.storage_bytes:
            return set()
        numbers = [*range(len(self.tensors)), *self.wrappers]
        changed = {numbers[at] for at, (a, b) in enumerate(zip(self.versions, now, strict=True)) if a != b}
        sizes_of = zip(self.storages, self.storage_bytes, sizes, strict=True)
        if cut := {storage_identity(storage) for storage, a, b in sizes_of if a != b}:
            strided = [number for number, tensor in enumerate(self.tensors) if tensor.layout is torch.strided]
            changed.update(number for number in strided if storage_identity(self.tensors[number]) in cut)
        return changed

    def source(self, item: int) -> tuple[torch.Tensor, tuple[int, ...]]:
        """The local tensor that an item of a tensor lies in, and at which offset."""
        tensor, *offset = self._source_rows[item]
        return self.tensors[tensor], tuple(offset)


class Describer:
    """Describes states that are mostly the same from one time to the next, and says when they are.

    Not thread-safe. Holds no tensor between calls. Pickles without what it keeps.
    """

    def __init__(self) -> None:
        self._last: tuple[LocalState, Items] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_last": None}

    @gc_paused()
    def describe(
        self, flat: Mapping[str, Any], object_bytes: Mapping[str, int] | None = None, node: int = 0
    ) -> tuple[Description, bool]:
        """Describes `flat`, and whether its inventory is the one of the call before (then it is that very object).

        `object_bytes` are what objects took when last saved: weights for planning, whose change alone changes nothing.
        Raises `CheckpointError` with the key for a dtype or placement that no checkpoint can hold.
        """
        values = list(flat.values())
        last_state, last_items = self._last or (None, None)
        state = look(list(flat), values, node, last_state)
        if last_state is not None and last_items is not None and state.like(last_state):
            items = last_items
        else:
            items = make_items(state, object_bytes or {})
            if last_items is not None and items.identity == last_items.identity:
                items = replace(items, inventory=last_items.inventory)
        same = last_items is not None and items.inventory is last_items.inventory
        ready, storages, storage_bytes = ready_tensors_and_storages(state.tensors, state.table)
        description = Description(
            items.inventory,
            items.names,
            items.sources,
            state.tensors,
            state.table,
            ready,
            {state.keys[position]: values[position] for position in items.objects},
            {state.keys[position]: values[position] for position in items.other},
            dict(enumerate([values[position] for position in state.groups.dtensors], len(state.groups.plain))),
            storages,
            storage_bytes,
        )
        state.tensors = []  # kept, they would hold a model in memory
        self._last = state, items
        return description, same
