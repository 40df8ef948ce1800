"""`State` is what a rank holds when it saves or loads: an inventory of chunks and objects, and the memory of each."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from .._engine import _C, torch_private
from .._engine.torch_private import DTensorLayout, storage_identity
from .._engine.torch_types import dtensor_type
from .._engine.wrapper_tensors import is_wrapper
from .chunks import Chunk, describes_itself
from .tensor_table import ON_HOST, PLAIN_TYPES, read_tensors

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass
class Groups:
    """The keys and types of a state's values, and the indices of the values of each kind."""

    keys: list[str] = field(default_factory=list)
    types: list[type] = field(default_factory=list)
    own: Set[int] = frozenset()  #: tensors that list their chunks themselves, whatever their types are
    plain: list[int] = field(default_factory=list)
    dtensors: list[int] = field(default_factory=list)  #: those whose chunks follow from placements
    chunked: list[int] = field(default_factory=list)  #: `own`, and tensors of other classes
    objects: list[int] = field(default_factory=list)
    other: list[int] = field(default_factory=list)  #: values without items
    tensors: list[int] = field(default_factory=list)  #: the tensors in all these groups

    @classmethod
    def of(cls, keys: list[str], types: list[type], loading: bool, own: Set[int] = frozenset()) -> Groups:
        kinds = set(types)
        if not own and kinds.issubset(PLAIN_TYPES) and set(map(type, keys)) <= {str}:
            every = list(range(len(keys)))
            return cls(keys, types, plain=every, tensors=every)
        groups = cls(keys, types, own)
        where = {kind: groups._group(kind, loading) for kind in kinds}
        for position, (key, kind) in enumerate(zip(keys, types, strict=True)):
            named = type(key) is str
            if named and issubclass(kind, torch.Tensor):
                groups.tensors.append(position)
            if position in own:
                groups.chunked.append(position)
            else:
                (where[kind] if named else groups.other).append(position)
        return groups

    def _group(self, kind: type, loading: bool) -> list[int]:
        if kind in PLAIN_TYPES:
            return self.plain
        if issubclass(kind, dtensor_type()):
            return self.dtensors
        if issubclass(kind, torch.Tensor):
            return self.chunked
        return self.other if describes_itself(kind, loading) else self.objects


@dataclass(eq=False)
class State:
    """What a rank holds, under DCP's keys.

    The inventory (csrc/state/inventory.h) is plain bytes. Equal keys, dtypes, shapes and shards give equal bytes. The
    other fields stay on the rank. `tensors` has the plain tensors first, then the local tensors of DTensors, then the
    chunks of all others. Each group is in the order of the keys.
    """

    tensors: list[torch.Tensor]  #: local tensors; `table` is valid as long as they live unchanged
    table: bytes  #: `TensorReads.table` of `tensors`
    ready: bytes  #: the flag of `TensorReads.ready` for each: whether the engine or a snapshot may use its memory
    # What is planned on
    inventory: bytes = b""  #: it has an item for each chunk of a tensor and each object, in the order of the keys
    names: list[str] = field(default_factory=list)  #: the key of each item
    sources: bytes = b""  #: 64-bit integers of each item: tensor, dimensions n, n offsets in it; of an object: -1, 0
    objects: dict[str, Any] = field(default_factory=dict)  #: values of the items that are no tensors
    other: dict[str, Any] = field(default_factory=dict)  #: values without items: they describe themselves to DCP
    paths: Mapping[str, Any] | None = None  #: the path of each key: DCP's planner_data; None: it is the key
    structure: str = ""  #: `Structure.pack`: what the paths leave out
    # Detects changes of values
    wrappers: dict[int, DTensor] = field(default_factory=dict)  #: {index of its local tensor: DTensor, counted apart}
    storages: list[torch.UntypedStorage] = field(default_factory=list)  #: kept alive if a tensor is given another one
    storage_bytes: array[int] = field(default_factory=lambda: array("q"))
    versions: array[int] = field(default_factory=lambda: array("q"))  #: of `tensors`, then of `wrappers`
    # The form: a state of the same form has the same inventory
    groups: Groups = field(default_factory=Groups)
    node: int = 0
    layouts: list[DTensorLayout] = field(default_factory=list)  #: of the DTensors
    local_types: list[type] = field(default_factory=list)  #: types of the local tensors of DTensors
    #: shape and chunks of `groups.chunked`; None: they cannot be listed as rows
    chunks: list[tuple[tuple[int, ...], list[Chunk]] | None] = field(default_factory=list)
    requires_grad: bytes = b""  #: 1 or 0 for the plain tensors, then the DTensors

    @classmethod
    def of_new(cls, inventory: bytes, names: list[str], sources: bytes, tensors: list[torch.Tensor]) -> State:
        """New tensors in host memory for a load, all with one item each, which nothing else knows yet."""
        reads = read_tensors(tensors)
        return cls(tensors, reads.table, reads.ready, inventory, names, sources)

    # --- From state to state

    def has_form_of(self, other: State) -> bool:
        """Whether both have the same inventory. `self` must have been read with `other` as the last state."""
        return (
            self.groups is other.groups
            and self.node == other.node
            and self.requires_grad == other.requires_grad
            and self.local_types == other.local_types
            and (self.layouts is other.layouts or self.layouts == other.layouts)
            and self.chunks == other.chunks
            and _C.same_shapes(self.table, other.table)
        )

    def without_values(self) -> State:
        """The form and the inventory alone: what holds no model in memory."""
        other = dict.fromkeys(self.other)
        return replace(self, tensors=[], objects={}, other=other, wrappers={}, storages=[], paths=None)

    # --- For the engine

    @property
    def for_engine(self) -> _C.State:
        """The tables from which the engine makes those of a plan."""
        return _C.State(self.inventory, self.sources, self.table, self.ready)

    @property
    def all_ready(self) -> bool:
        """Whether the engine may use the memory of all tensors."""
        return self.ready.count(ON_HOST) == len(self.ready)

    # --- Items

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

    def source(self, item: int) -> tuple[torch.Tensor, tuple[int, ...]]:
        """Returns the local tensor that holds an item, and the item's offset in it. The item must not be an object."""
        tensor, *offset = self._source_rows[item]
        return self.tensors[tensor], tuple(offset)

    # --- Changes

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
