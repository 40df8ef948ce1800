"""Describes what a rank holds, for planning: reads the keys, types, layouts and local tensors of a state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from .._engine import torch_private
from .._engine.gc import gc_paused
from .._engine.rows import SHARD, TENSOR
from .._engine.tensor_checks import dense, is_plain_tensor
from .._engine.torch_types import dtensor_type, is_sharded_tensor
from .._engine.wrapper_tensors import is_wrapper, type_name
from ..errors import CheckpointError
from .chunks import Chunk, Chunks, chunks_to_read, chunks_to_write, locals_with_own_chunks, with_own_chunks
from .inventory_rows import add_inventory
from .state import Groups, State
from .tensor_table import read_tensors

if TYPE_CHECKING:
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor


class Describer:
    """Describes states, and reuses the inventory of the previous call if the form of the state has not changed.

    Not thread-safe. Holds no tensor between calls. `loading`: asks tensors for the chunks that a load reads, which may
    differ from those that a save writes.
    """

    def __init__(self, loading: bool = False) -> None:
        self._loading = loading
        self._last: State | None = None

    @gc_paused()
    def describe(self, flat: Mapping[str, Any], node: int = 0) -> State:
        """Raises `CheckpointError` with the key for a dtype or placement that no checkpoint can hold."""
        last, state = self._last, self._read(list(flat), list(flat.values()), node)
        if last is not None and state.has_form_of(last):
            state.inventory, state.names, state.sources = last.inventory, last.names, last.sources
            state.other = last.other
        else:
            add_inventory(state)
        state.objects = {key: flat[key] for key in map(state.groups.keys.__getitem__, state.groups.objects)}
        state.other = {key: flat[key] for key in state.other}
        self._last = state.without_values()
        return state

    def _read(self, keys: list[str], values: list[Any], node: int) -> State:
        """Reads all but the inventory. What equals the last state's is the same object."""
        last, loading, types = self._last, self._loading, list(map(type, values))
        if last is not None and (keys, types) == (last.groups.keys, last.groups.types):
            groups = last.groups
        else:
            groups = Groups.of(keys, types, loading)
        local = torch_private.local_tensors(_at(values, groups.dtensors))
        if (own := self._own(values, groups, local)) != groups.own:
            groups = Groups.of(keys, types, loading, own)
            local = torch_private.local_tensors(_at(values, groups.dtensors))
        plain, dtensors = _at(values, groups.plain), _at(values, groups.dtensors)
        ask = chunks_to_read if loading else chunks_to_write
        chunked = [
            ask(keys[position], values[position])
            if position in groups.own
            else _whole_chunks(keys[position], values[position], loading)
            for position in groups.chunked
        ]
        tensors = [*plain, *local]
        wrappers = dict(enumerate(dtensors, len(plain)))
        for position, chunks in zip(groups.chunked, chunked, strict=True):
            if chunks is not None:
                if isinstance(values[position], dtensor_type()):
                    added = range(len(tensors), len(tensors) + len(chunks.tensors))
                    wrappers.update(dict.fromkeys(added, values[position]))
                tensors += chunks.tensors
        reads = read_tensors(tensors)
        versions, requires_grad = torch_private.tensor_facts(list(wrappers.values()))
        return State(
            tensors,
            reads.table,
            reads.ready,
            wrappers=wrappers,
            storages=reads.storages,
            storage_bytes=reads.storage_bytes,
            versions=reads.versions + versions,
            groups=groups,
            node=node,
            layouts=torch_private.dtensor_layouts(dtensors, None if last is None else last.layouts),
            local_types=list(map(type, local)),
            chunks=[None if chunks is None else (chunks.shape, chunks.chunks) for chunks in chunked],
            requires_grad=reads.requires_grad[: len(plain)] + requires_grad[: len(dtensors)],
        )

    def _own(self, values: list[Any], groups: Groups, local: list[torch.Tensor]) -> set[int]:
        """The indices of the tensors that list their chunks themselves. `local`: of `groups.dtensors`."""
        loading = self._loading
        own = {groups.tensors[index] for index in with_own_chunks(_at(values, groups.tensors), loading)}
        own.update(groups.dtensors[index] for index in locals_with_own_chunks(local, loading))
        if groups.own:  # these are not among `local`
            known = [position for position in groups.own if isinstance(values[position], dtensor_type())]
            local = torch_private.local_tensors([values[position] for position in known])
            own.update(known[index] for index in locals_with_own_chunks(local, loading))
        return own


def _at(values: list[Any], positions: list[int]) -> list[Any]:
    return values if len(positions) == len(values) else [values[position] for position in positions]


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
