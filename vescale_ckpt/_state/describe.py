"""Describes a rank's state for planning: an inventory of its chunks and objects, and the memory that holds each chunk.

The inventory (csrc/state/inventory.h) is plain bytes. Equal keys, dtypes, shapes and shards give equal bytes. The other
fields of a `Description` stay on the rank.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from .._engine import _C, torch_private
from .._engine.gc import gc_paused
from .._engine.torch_private import storage_identity
from .._engine.wrapper_tensors import is_wrapper
from .inventory_rows import Items, make_items
from .local_state import LocalState, look
from .tensor_table import ON_HOST, tensor_table

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Description:
    """A rank's state that is saved or loaded."""

    inventory: bytes  #: it has an item for each chunk of a tensor and each object, in the order of the keys
    names: list[str]  #: the key of each item
    offered: bytes  #: whether other ranks may hold the same chunk, for each item, as far as is known; empty: all
    sources: bytes  #: 64-bit integers of each item: tensor, dimensions n, n offsets in it; of an object: -1, 0
    tensors: list[torch.Tensor]  #: local tensors; `table` is valid as long as they live unchanged
    table: bytes  #: `tensor_table` of `tensors`
    ready: bytes  #: the flag of `TensorReads.ready` for each: whether the engine or a snapshot may use its memory
    objects: dict[str, Any]  #: values of the items that are no tensors
    other: dict[str, Any]  #: values without items: they describe themselves to DCP, or show no shape
    wrappers: dict[int, DTensor]  #: {index of the local tensor: DTensor}; each has its own version counter
    storages: list[torch.UntypedStorage]  #: storages of `tensors`, kept alive if a tensor is given another one
    storage_bytes: array[int]
    versions: array[int]  #: the version counters of `tensors`, then of `wrappers`

    @classmethod
    def of_new(cls, inventory: bytes, names: list[str], sources: bytes, tensors: list[torch.Tensor]) -> Description:
        """Describes new tensors in host memory for a load, all with one item each, which nothing else knows yet."""
        table, ready = tensor_table(tensors), bytes([ON_HOST]) * len(tensors)
        return cls(inventory, names, b"", sources, tensors, table, ready, {}, {}, {}, [], array("q"), array("q"))

    @property
    def for_engine(self) -> _C.State:
        """The tables from which the engine makes those of a plan."""
        return _C.State(self.inventory, self.sources, self.table, self.ready)

    @property
    def all_ready(self) -> bool:
        """Whether the engine may use the memory of all tensors."""
        return self.ready.count(ON_HOST) == len(self.ready)

    @cached_property
    def items(self) -> list[tuple[Any, ...]]:
        """The unpacked inventory: name, kind, dtype code, requires_grad, bytes, shape, offset, size."""
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

    def tensor_index(self, item: int) -> int:
        """Returns the index in `tensors` of the tensor that holds an item. The item must not be an object."""
        return self._source_rows[item][0]

    def changed(self) -> set[int]:
        """Returns the indices in `tensors` that changed since they were described, or whose memory was freed or cut."""
        now = array("q", torch_private.versions([*self.tensors, *self.wrappers.values()]))
        sizes = array("q", map(torch.UntypedStorage.nbytes, self.storages))
        if now == self.versions and sizes == self.storage_bytes:
            return set()
        indices = [*range(len(self.tensors)), *self.wrappers]
        changed = {indices[at] for at, (a, b) in enumerate(zip(self.versions, now, strict=True)) if a != b}
        sizes_of = zip(self.storages, self.storage_bytes, sizes, strict=True)
        if cut := {storage_identity(storage) for storage, a, b in sizes_of if a != b}:
            strided = [
                index
                for index, tensor in enumerate(self.tensors)
                if tensor.layout is torch.strided and not is_wrapper(tensor)
            ]
            changed.update(index for index in strided if storage_identity(self.tensors[index]) in cut)
        return changed

    def source(self, item: int) -> tuple[torch.Tensor, tuple[int, ...]]:
        """Returns the local tensor that holds an item, and the item's offset in it. The item must not be an object."""
        tensor, *offset = self._source_rows[item]
        return self.tensors[tensor], tuple(offset)


class Describer:
    """Describes states, and reuses the inventory of the previous call if the form of the state has not changed.

    Not thread-safe. Holds no tensor between calls. `loading`: asks tensors for the chunks that a
    load reads, which may differ from those that a save writes.
    """

    def __init__(self, loading: bool = False) -> None:
        self._loading = loading
        self._last: tuple[LocalState, Items] | None = None

    @gc_paused()
    def describe(self, flat: Mapping[str, Any], node: int = 0) -> Description:
        """Raises `CheckpointError` with the key for a dtype or placement that no checkpoint can hold."""
        values = list(flat.values())
        last_state, last_items = self._last or (None, None)
        state, reads, versions = look(list(flat), values, node, last_state, self._loading)
        if last_state is not None and last_items is not None and state.like(last_state):
            items = last_items
        else:
            items = make_items(state)
        description = Description(
            items.inventory,
            items.names,
            items.offered,
            items.sources,
            state.tensors,
            state.table,
            reads.ready,
            {state.keys[position]: values[position] for position in items.objects},
            {state.keys[position]: values[position] for position in items.other},
            state.wrappers,
            reads.storages,
            reads.storage_bytes,
            reads.versions + versions,
        )
        state.tensors, state.wrappers = [], {}  # otherwise the describer would keep a model in memory
        self._last = state, items
        return description
