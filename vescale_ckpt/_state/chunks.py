"""Asks tensors which chunks of a whole tensor they hold, for saves and loads, in the same way as stock DCP.

Stock DCP asks each value by a method of its protocol: `__create_write_items__` on a save, `__create_chunk_list__` on a
load. The method may be defined in the type or set on the instance, and takes precedence over placements. A DTensor
passes the call to its local tensor. If there is no such method, the four fields of torch's `CheckpointableTensor`
count; torch before 2.14 does not know them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .._engine import _C, torch_private
from .._engine.rows import SHARD, TENSOR
from .._engine.torch_types import dtensor_type, is_dtensor
from .._engine.wrapper_tensors import is_wrapper, type_name
from ..errors import CheckpointError
from .tensor_table import narrowed

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

_WRITE, _READ, _SHARD = "__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__"
_SPMD_TYPE = "_local_type"  # spmd_types sets it: {axis of a mesh: type}
_FIELDS = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


class Chunk(NamedTuple):
    """A chunk of a whole tensor."""

    kind: int  #: TENSOR or SHARD
    requires_grad: bool
    offset: tuple[int, ...]
    size: tuple[int, ...]
    uncut: bool = False  #: whether no plan may cut it


class Chunks(NamedTuple):
    """The chunks of a tensor that this rank holds."""

    shape: tuple[int, ...]  #: shape of the whole tensor
    chunks: list[Chunk]
    tensors: list[torch.Tensor]  #: the local tensor of each chunk

    def at(self, index: MetadataIndex) -> torch.Tensor:
        """Returns the tensor of the chunk at the index's offset. Raises ValueError if there is none."""
        offsets = [chunk.offset for chunk in self.chunks]
        if index.offset not in offsets:
            raise ValueError(f"{index.fqn}: expected the offset of a chunk, one of {offsets}, got {index.offset}")
        return self.tensors[offsets.index(index.offset)]


def describes_itself(kind: type, loading: bool) -> bool:
    """Whether values of a type list their own items or chunks for DCP."""
    return hasattr(kind, _asks(loading))


def with_own_chunks(tensors: list[Any], loading: bool) -> list[int]:
    """Returns the indices of the tensors that list their chunks themselves, and of those that should: their SPMD types
    differ between ranks. `tensors` may have any type. A DTensor whose local tensor lists its chunks is not included."""
    of_dtensors = tuple(getattr(kind, name) for kind in dtensor_type() for name in (_WRITE, _READ))
    # What the methods of DTensor return follows from placements.
    found = _C.with_attributes(tensors, (_asks(loading), _FIELDS[0], _SPMD_TYPE), of_dtensors)
    return [
        index
        for index in found
        if hasattr(tensors[index], _asks(loading)) or has_fields(tensors[index]) or _differing_axes(tensors[index])
    ]


def locals_with_own_chunks(local_tensors: list[torch.Tensor], loading: bool) -> list[int]:
    """Returns the indices of the local tensors that list chunks for their DTensors."""
    return _C.with_attributes(local_tensors, (_asks(loading),), ())


def tells_chunks(value: Any, loading: bool) -> bool:
    """Whether a value or its local tensor lists its chunks."""
    if type(value) in dtensor_type() and locals_with_own_chunks(torch_private.local_tensors([value]), loading):
        return True
    return isinstance(value, torch.Tensor) and bool(with_own_chunks([value], loading))


def _differing_axes(value: Any) -> list[str]:
    """Returns the axes, each with its type, along which ranks hold different values of a tensor under one name: varying
    (V, also for shards) or partial (P) by its SPMD type."""
    types = getattr(value, _SPMD_TYPE, None)
    named = types.items() if isinstance(types, dict) and not is_dtensor(value) else ()
    return [f"{axis}: {kind!r}" for axis, kind in named if getattr(kind, "value", "") in ("V", "P")]


def has_fields(value: Any) -> bool:
    """Whether a value is what torch calls a `CheckpointableTensor`."""
    return isinstance(value, torch.Tensor) and all(hasattr(value, name) for name in _FIELDS)


def whole_shape(value: torch.Tensor) -> torch.Size:
    """Returns the shape of the whole tensor that a value is a part of."""
    return torch.Size(value.global_shape) if has_fields(value) else value.size()  # type: ignore[attr-defined]


def chunks_to_write(key: str, value: Any) -> Chunks | None:
    """Asks a value for its chunks in a save. Returns None if it lists more than chunks of one tensor.

    Raises `CheckpointError` with the key if it cannot list them, or if they do not match the tensors that it holds.
    """
    return _ask(key, value, _chunks_to_write)


def chunks_to_read(key: str, value: Any) -> Chunks:
    """Does the same for a load."""
    found = _ask(key, value, _chunks_to_read)
    assert found is not None
    return found


def _ask(key: str, value: Any, ask: Callable[[str, Any], Chunks | None]) -> Chunks | None:
    if is_dtensor(value) and value.device_mesh.get_coordinate() is None:
        return Chunks(tuple(value.size()), [], [])
    try:
        found = ask(key, value)
        if found is not None:
            for chunk, tensor in zip(found.chunks, found.tensors, strict=True):
                _check(chunk, tensor, found.shape)
        return found
    except Exception as error:  # the code of a value may raise anything
        raise CheckpointError(f"{key}: its own list of chunks cannot be used: {error}", key=key) from error


def _chunks_to_write(key: str, value: Any) -> Chunks | None:
    if not hasattr(value, _WRITE):
        return _chunks_of_fields(value)
    from torch.distributed.checkpoint.planner import WriteItemType

    kinds = {WriteItemType.TENSOR: TENSOR, WriteItemType.SHARD: SHARD}
    items: list[WriteItem] = value.__create_write_items__(key, value)
    found = Chunks(tuple(value.size()), [], [])
    for item in items:
        data = item.tensor_data
        if data is None or item.index.fqn != key:
            return None
        found = found._replace(shape=tuple(data.size))
        chunk = Chunk(
            kinds[item.type], data.properties.requires_grad, tuple(data.chunk.offsets), tuple(data.chunk.sizes)
        )
        tensor = shard_at(value, item.index)
        if tensor.dtype != data.properties.dtype:
            raise ValueError(f"expected a chunk of {data.properties.dtype}, got {tensor.dtype}")
        found.chunks.append(chunk)
        found.tensors.append(tensor)
    if len({tuple(item.tensor_data.size) for item in items if item.tensor_data is not None}) > 1:
        raise ValueError("expected one shape of the whole tensor, got several")
    return found


def _chunks_to_read(key: str, value: Any) -> Chunks:
    if not hasattr(value, _READ):
        return _chunks_of_fields(value)
    from torch.distributed.checkpoint.metadata import MetadataIndex

    found = Chunks(tuple(whole_shape(value)), [], [])
    for index, chunk in enumerate(value.__create_chunk_list__()):
        offset = torch.Size(chunk.offsets)
        found.chunks.append(Chunk(SHARD, value.requires_grad, tuple(offset), tuple(chunk.sizes)))
        found.tensors.append(shard_at(value, MetadataIndex(key, offset, index)))
    return found


def _chunks_of_fields(value: Any) -> Chunks:
    if not has_fields(value) and (axes := _differing_axes(value)):
        raise ValueError(
            f"ranks hold different values of it, by its SPMD type {{{', '.join(axes)}}}, and it does not say which "
            "part of the whole tensor this is: redistribute it, make it a DTensor, or wrap it as PerRank"
        )
    found = Chunks(tuple(value.global_shape), [], [])
    for offset, size, local_offset in zip(value.global_offsets, value.local_sizes, value.local_offsets, strict=True):
        found.chunks.append(Chunk(SHARD, value.requires_grad, tuple(offset), tuple(size)))
        found.tensors.append(_narrowed(value, local_offset, size))
    return found


def copy_protocol(source: torch.Tensor, target: torch.Tensor) -> None:
    """Makes `target`, a copy of `source` in other memory, list the same chunks."""
    sources, targets = [source], [target]
    if is_dtensor(source) and is_dtensor(target):
        sources += torch_private.local_tensors([source])
        targets += torch_private.local_tensors([target])
    for one, other in zip(sources, targets, strict=True):
        for name in (_WRITE, _READ, _SHARD, *_FIELDS):
            if name in vars(one):
                setattr(other, name, vars(one)[name])


def shard_at(value: Any, index: MetadataIndex) -> torch.Tensor:
    """Returns the local tensor that holds the chunk at the index's offset of a value. Raises ValueError if none
    does."""
    if is_dtensor(value):
        (local,) = torch_private.local_tensors([value])
        (of_dtensors,) = (getattr(kind, _SHARD) for kind in dtensor_type())
        if not _C.with_attributes([value, local], (_SHARD,), (of_dtensors,)):
            return local
    if hasattr(value, _SHARD) or not has_fields(value):
        from torch.distributed.checkpoint.utils import find_tensor_shard

        with torch.no_grad():
            return find_tensor_shard(value, index)
    return _chunks_of_fields(value).at(index)


@torch.no_grad()
def _narrowed(value: torch.Tensor, offset: Sequence[int], size: Sequence[int]) -> torch.Tensor:
    for start, length, whole in zip(offset, size, value.shape, strict=True):
        if not 0 <= start <= start + length <= whole:
            raise ValueError(f"expected a chunk within {tuple(value.shape)}, got {tuple(size)} at {tuple(offset)}")
    return narrowed(value, offset, size)


def _check(chunk: Chunk, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if is_wrapper(tensor):  # a plan might cut the chunk, and wrappers cannot be cut
        raise ValueError(f"expected plain tensors as its chunks, got a {type_name(tensor)}")
    for start, length, whole in zip(chunk.offset, chunk.size, shape, strict=True):
        if not 0 <= start <= start + length <= whole:
            raise ValueError(f"expected a chunk of a tensor of shape {shape}, got {chunk.size} at {chunk.offset}")
    if tuple(tensor.shape) != chunk.size:
        raise ValueError(f"expected a tensor of shape {chunk.size} at {chunk.offset}, got one of {tuple(tensor.shape)}")


def _asks(loading: bool) -> str:
    return _READ if loading else _WRITE
