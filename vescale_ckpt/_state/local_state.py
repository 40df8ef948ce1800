"""Reads the keys, types, layouts and local tensors of a state on this rank, for `describe`."""

from __future__ import annotations

from array import array
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from .._engine import _C, torch_private
from .._engine.rows import SHARD, TENSOR
from .._engine.tensor_checks import dense, is_plain_tensor
from .._engine.torch_private import DTensorLayout
from .._engine.torch_types import dtensor_type, is_sharded_tensor
from .._engine.wrapper_tensors import is_wrapper, type_name
from ..errors import CheckpointError
from .chunks import (
    Chunk,
    Chunks,
    chunks_to_read,
    chunks_to_write,
    describes_itself,
    locals_with_own_chunks,
    with_own_chunks,
)
from .tensor_table import PLAIN_TYPES, TensorReads, read_tensors

if TYPE_CHECKING:
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed.tensor import DTensor


@dataclass
class Groups:
    """The indices of values of each kind, in a state whose keys and types are known."""

    plain: list[int] = field(default_factory=list)
    dtensors: list[int] = field(default_factory=list)
    chunked: list[int] = field(default_factory=list)  #: tensors that list their chunks, or are of other classes
    objects: list[int] = field(default_factory=list)
    other: list[int] = field(default_factory=list)
    tensors: list[int] = field(default_factory=list)  #: the tensors in all these groups

    @classmethod
    def of(cls, keys: list[str], types: list[type], loading: bool, own: Collection[int] = ()) -> Groups:
        """`own`: the indices of the tensors that list their chunks themselves, whatever their types are."""
        kinds = set(types)
        if not own and kinds.issubset(PLAIN_TYPES) and set(map(type, keys)) <= {str}:
            every = list(range(len(keys)))
            return cls(plain=every, tensors=every)
        groups = cls()
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


@dataclass
class LocalState:
    """A state's keys and traits, and its tensors on this rank.

    `tensors` has the plain tensors first, then the local tensors of DTensors, then the chunks of all others. Each group
    is in the order of the keys.
    """

    keys: list[str]
    types: list[type]
    by_type: Groups
    own: list[int]  #: indices of the tensors that list their chunks themselves
    groups: Groups  #: `by_type`, except for `own`
    node: int
    layouts: list[DTensorLayout]
    local_types: list[type]  #: types of the local tensors of DTensors
    chunks: list[tuple[tuple[int, ...], list[Chunk]] | None]  #: shape and chunks; None: they cannot be listed as rows
    requires_grad: bytes  #: 1 or 0 for the plain tensors, then the DTensors
    tensors: list[torch.Tensor]
    wrappers: dict[int, DTensor]  #: {index of the local tensor: DTensor}
    table: bytes

    def like(self, other: LocalState) -> bool:
        """Whether both have the same description. `self` must come from `look` with `other` as `last`."""
        return (
            self.groups is other.groups
            and self.node == other.node
            and self.requires_grad == other.requires_grad
            and self.local_types == other.local_types
            and (self.layouts is other.layouts or self.layouts == other.layouts)
            and self.chunks == other.chunks
            and _C.same_shapes(self.table, other.table)
        )


def look(
    keys: list[str], values: list[Any], node: int, last: LocalState | None, loading: bool
) -> tuple[LocalState, TensorReads, array[int]]:
    """Reads a state. Also returns what was read of the tensors, and the version counters of `wrappers`. `last`: the
    previous state, whose equal parts are reused. `loading`: asks tensors for the chunks that a load reads."""
    types = list(map(type, values))
    known = last if last is not None and keys == last.keys and types == last.types else None
    groups = by_type = known.by_type if known is not None else Groups.of(keys, types, loading)
    local = torch_private.local_tensors(_at(values, by_type.dtensors))
    own = _with_own_chunks(values, by_type, local, loading)
    telling = frozenset(own)
    if own:
        unchanged = known is not None and own == known.own
        groups = known.groups if known is not None and unchanged else Groups.of(keys, types, loading, telling)
        local = torch_private.local_tensors(_at(values, groups.dtensors))
    plain, dtensors = _at(values, groups.plain), _at(values, groups.dtensors)
    ask = chunks_to_read if loading else chunks_to_write
    chunked = [
        ask(keys[position], values[position])
        if position in telling
        else _whole_chunks(keys[position], values[position], loading)
        for position in groups.chunked
    ]
    tensors = [*plain, *local]
    wrappers = {number: dtensor for number, dtensor in enumerate(dtensors, len(plain))}
    dtensor = dtensor_type()
    for position, chunks in zip(groups.chunked, chunked, strict=True):
        if chunks is not None:
            if isinstance(values[position], dtensor):
                wrappers.update(
                    dict.fromkeys(range(len(tensors), len(tensors) + len(chunks.tensors)), values[position])
                )
            tensors += chunks.tensors
    reads = read_tensors(tensors)
    versions, requires_grad = torch_private.tensor_facts(list(wrappers.values()))
    state = LocalState(
        keys,
        types,
        by_type,
        own,
        groups,
        node,
        torch_private.dtensor_layouts(dtensors, None if last is None else last.layouts),
        list(map(type, local)),
        [None if chunks is None else (chunks.shape, chunks.chunks) for chunks in chunked],
        reads.requires_grad[: len(plain)] + requires_grad[: len(dtensors)],
        tensors,
        wrappers,
        reads.table,
    )
    return state, reads, versions


def _at(values: list[Any], positions: list[int]) -> list[Any]:
    return values if len(positions) == len(values) else [values[position] for position in positions]


def _with_own_chunks(values: list[Any], groups: Groups, local: list[torch.Tensor], loading: bool) -> list[int]:
    """Returns the indices of the tensors that list their chunks themselves, in ascending order."""
    found = {groups.tensors[index] for index in with_own_chunks(_at(values, groups.tensors), loading)}
    found.update(groups.dtensors[index] for index in locals_with_own_chunks(local, loading))
    return sorted(found)


def _memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the plain tensor in whose memory the values of a subclass lie. A wrapper, which is stored as its inner
    tensors, is returned as it is, and so is a tensor without such memory, which is refused when it is written."""
    if is_wrapper(tensor):
        return tensor
    try:
        with torch.no_grad():
            plain = dense(tensor)
            return plain if (plain.size(), plain.dtype) == (tensor.size(), tensor.dtype) else tensor
    except Exception:  # code of a subclass may raise anything
        return tensor


def _whole_chunks(key: str, value: torch.Tensor | ShardedTensor, loading: bool) -> Chunks | None:
    """Returns the chunks of a ShardedTensor, or the one of a tensor of another class: its memory, which no plan may cut
    if it is not that of a plain tensor. A load calls `copy_` of the class; None if the class shows no shape there."""
    if is_sharded_tensor(value):
        shards, metadata = value.local_shards(), value.metadata()
        requires_grad = bool(metadata.tensor_properties.requires_grad)
        places = [(tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes)) for shard in shards]
        return Chunks(
            tuple(metadata.size),
            [Chunk(SHARD, requires_grad, offset, size) for offset, size in places],
            [shard.tensor for shard in shards],
        )
    memory = value if loading else _memory_of(value)
    try:
        shape = tuple(map(int, memory.shape))
    except Exception as error:  # a jagged tensor has none, and code of a subclass may raise anything
        if loading:
            return None
        raise CheckpointError(
            f"{key}: a {type_name(memory)} has no shape of numbers: save the tensors that it is made of",
            key=key,
        ) from error
    chunk = Chunk(TENSOR, value.requires_grad, (0,) * len(shape), shape, uncut=not is_plain_tensor(memory))
    return Chunks(shape, [chunk], [memory])
