"""Reads the keys, types, layouts and local tensors of a state on this rank, for `describe`."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from .._engine import _C, torch_private
from .._engine.torch_private import DTensorLayout
from .._engine.wrapper_tensors import is_wrapper_type
from .tensor_table import PLAIN_TYPES, TensorReads, read_tensors


@dataclass
class Groups:
    """The positions of values of each kind, in a state whose keys and types are known."""

    plain: list[int] = field(default_factory=list)
    dtensors: list[int] = field(default_factory=list)
    sharded: list[int] = field(default_factory=list)
    wrapper_subclasses: list[int] = field(default_factory=list)  #: tensors that consist of inner tensors
    objects: list[int] = field(default_factory=list)
    other: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, keys: list[str], types: list[type]) -> Groups:
        kinds = set(types)
        if kinds.issubset(PLAIN_TYPES) and set(map(type, keys)) <= {str}:
            return cls(plain=list(range(len(keys))))
        groups = cls()
        where = {kind: groups._group(kind) for kind in kinds}
        for position, (key, kind) in enumerate(zip(keys, types, strict=True)):
            (where[kind] if type(key) is str else groups.other).append(position)
        return groups

    def _group(self, kind: type) -> list[int]:
        if kind in PLAIN_TYPES:
            return self.plain
        if kind is DTensor:
            return self.dtensors
        if kind is ShardedTensor:
            return self.sharded
        if is_wrapper_type(kind) and not describes_itself(kind):
            return self.wrapper_subclasses
        if issubclass(kind, torch.Tensor) or describes_itself(kind):
            return self.other
        return self.objects


@dataclass
class LocalState:
    """A state's keys and traits, and the tensors on this rank.

    `tensors` has the plain tensors first, then the local tensors of DTensors, then the shards of ShardedTensors, then
    wrapper subclasses. Each group is in the order of the keys.
    """

    keys: list[str]
    types: list[type]
    groups: Groups
    node: int
    layouts: list[DTensorLayout]
    local_types: list[type]
    shards: list[Any]
    requires_grad: bytes  #: of the plain tensors, then of the DTensors, then of wrapper subclasses: 1 or 0
    tensors: list[torch.Tensor]
    table: bytes

    def like(self, other: LocalState) -> bool:
        """Whether both have the same description. `self` must come from `look` with `other` as `last`."""
        return (
            self.groups is other.groups
            and self.node == other.node
            and self.requires_grad == other.requires_grad
            and self.local_types == other.local_types
            and (self.layouts is other.layouts or self.layouts == other.layouts)
            and self.shards == other.shards
            and _C.same_shapes(self.table, other.table)
        )


def look(
    keys: list[str], values: list[Any], node: int, last: LocalState | None
) -> tuple[LocalState, TensorReads, array[int]]:
    """Reads a state. `last`: the state before, of which equal parts are reused. Also returns all that was read of the
    tensors, and the version counters of the DTensors."""
    types = list(map(type, values))
    known = last is not None and keys == last.keys and types == last.types
    groups = last.groups if last is not None and known else Groups.of(keys, types)
    plain, dtensors = _at(values, groups.plain), _at(values, groups.dtensors)
    shards = [_Shards(values[position]) for position in groups.sharded]
    local = torch_private.local_tensors(dtensors)
    wrappers = _at(values, groups.wrapper_subclasses)
    tensors = [*plain, *local, *(tensor for value in shards for tensor in value.tensors), *wrappers]
    reads = read_tensors(tensors)
    versions, requires_grad = torch_private.tensor_facts(dtensors)
    state = LocalState(
        keys,
        types,
        groups,
        node,
        torch_private.dtensor_layouts(dtensors, None if last is None else last.layouts),
        list(map(type, local)),
        [value.traits for value in shards],
        reads.requires_grad[: len(plain)] + requires_grad + reads.requires_grad[len(tensors) - len(wrappers) :],
        tensors,
        reads.table,
    )
    return state, reads, versions


def _at(values: list[Any], positions: list[int]) -> list[Any]:
    return values if len(positions) == len(values) else [values[position] for position in positions]


class _Shards:
    """A ShardedTensor's local shards."""

    def __init__(self, value: ShardedTensor) -> None:
        shards = value.local_shards()
        metadata = value.metadata()
        self.tensors = [shard.tensor for shard in shards]
        boxes = [(tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes)) for shard in shards]
        self.traits = tuple(metadata.size), bool(metadata.tensor_properties.requires_grad), boxes


def describes_itself(kind: type) -> bool:
    """Whether values of a type tell DCP what to write or read of them."""
    return hasattr(kind, "__create_write_items__") or hasattr(kind, "__create_chunk_list__")
