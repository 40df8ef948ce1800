"""Writes `.metadata` for every torch version, and reads it without running code from it.

The file is DCP's own pickle of `Metadata`. Two things differ from `pickle.dump` and `pickle.load`. Tensor properties
are written with the five fields that every torch reads (torch 2.15 writes six, which 2.13 cannot read), and read with
five or more. The reader imports only the classes that metadata consists of.
"""

from __future__ import annotations

import copyreg
import dataclasses
import io
import math
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from ..._engine.gc import gc_paused
from ..._engine.rows import MOST_BYTES
from ..._engine.torch_private import MemoryFormatEncoding, StorageInfo
from ..._state import structure
from ..._state.chunk_rows import overlapping_chunk
from ...errors import CorruptCheckpointError, UntrustedCheckpointError
from .metadata_check import trailer
from .metadata_unpickler import MetadataUnpickler, StandIn, refused, unpickle

_FIELDS = {*(field.name for field in dataclasses.fields(Metadata)), structure.ATTRIBUTE}


class _LenientProperties(TensorProperties):
    """Takes the state of any torch version: five fields. Ignores further fields."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if not isinstance(state, tuple) or len(state) < 5:
            raise pickle.UnpicklingError("tensor properties are malformed")
        self.__class__ = TensorProperties  # type: ignore[assignment]
        TensorProperties.__init__(self, dtype=state[0], layout=state[1], requires_grad=state[2], pin_memory=state[4])


class _MetadataUnpickler(MetadataUnpickler):
    def class_of(self, name: str) -> Any:
        given = {"TensorProperties": _LenientProperties, "_StorageInfo": StorageInfo}
        return given[name] if name in given else getattr(dcp_metadata, name)


def loads(data: bytes, path: str) -> Metadata:
    """Reads the bytes of a `.metadata` file. `path` is for messages only. Drops attributes that no load needs.

    Raises `UntrustedCheckpointError` for imports that metadata never needs and for tensors of impossible sizes, and
    `CorruptCheckpointError` if the bytes are no sound metadata.
    """
    metadata: Metadata = unpickle(data, path, _MetadataUnpickler, Metadata)
    for name in vars(metadata).keys() - _FIELDS:
        delattr(metadata, name)
    with gc_paused():
        try:
            for key, stored in metadata.state_dict_metadata.items():
                _check_entry(key, stored)
            _drop_plans(metadata)
        except UntrustedCheckpointError as error:
            raise UntrustedCheckpointError(f"{error.message} (in {path})", key=key, path=path) from error
        except Exception as error:
            reason = f"{path} is damaged: {key}: {type(error).__name__}: {error}"
            raise CorruptCheckpointError(reason, key=str(key), file=path) from error
    return metadata


def _drop_plans(metadata: Metadata) -> None:
    """Leaves in `planner_data` the paths of keys, if it has anything else."""
    paths, keys = metadata.planner_data, metadata.state_dict_metadata
    if isinstance(paths, dict) and not paths.keys() <= keys.keys():
        metadata.planner_data = {key: path for key, path in paths.items() if key in keys}
    elif isinstance(paths, (StandIn, list)):
        metadata.planner_data = None


def _check_entry(key: Any, stored: Any) -> None:
    """Checks that a tensor's chunks lie in it and do not overlap. Raises nearly anything if they do not.

    The load itself checks that the chunks cover what it needs: the metadata of one rank that saved without collectives
    has only that rank's chunks.
    """
    if type(key) is not str:
        raise ValueError("it is no name")
    if isinstance(stored, StandIn):
        raise refused(type(stored).__module__, type(stored).__name__)
    if type(stored) is BytesStorageMetadata:
        return
    if type(stored) is not TensorStorageMetadata:
        raise ValueError(f"a {type(stored).__name__} describes it")
    size, dtype = stored.size, stored.properties.dtype
    if not isinstance(dtype, torch.dtype) or type(size) is not torch.Size:
        raise ValueError("it has no dtype or no shape")
    if math.prod(size) * dtype.itemsize >= MOST_BYTES or (size and min(size) < 0):
        raise UntrustedCheckpointError(f"{key}: no tensor of {dtype} has the shape {tuple(size)}")
    _check_chunks(size, stored.chunks)


def _check_chunks(size: torch.Size, chunks: list[ChunkStorageMetadata]) -> None:
    for number, chunk in enumerate(chunks):
        if type(chunk.offsets) is tuple and type(chunk.sizes) is tuple:  # stock DCP saves Megatron-FSDP's state so
            chunks[number] = chunk = ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
        if type(chunk.offsets) is not torch.Size or type(chunk.sizes) is not torch.Size:
            raise ValueError("a chunk has no offset or no shape")
        for offset, length, limit in zip(chunk.offsets, chunk.sizes, size, strict=True):
            if not 0 <= offset <= limit < MOST_BYTES or not 0 <= length <= limit - offset:
                where = f"{tuple(chunk.sizes)} at {tuple(chunk.offsets)}"
                raise ValueError(f"a chunk of {where} leaves its tensor of {tuple(size)}")
    if overlapping_chunk([(chunk.offsets, chunk.sizes) for chunk in chunks if math.prod(chunk.sizes)]) is not None:
        raise ValueError("its chunks overlap")


def _reduce_properties(properties: TensorProperties) -> tuple[Any, ...]:
    state = (
        properties.dtype,
        properties.layout,
        properties.requires_grad,
        MemoryFormatEncoding.TORCH_CONTIGUOUS_FORMAT,  # all records of this package are contiguous
        properties.pin_memory,
    )
    return copyreg.__newobj__, (TensorProperties,), state  # type: ignore[attr-defined]


def _reduce_storage_info(info: StorageInfo) -> tuple[Any, ...]:
    crc = getattr(info, "crc", None)
    place = (info.relative_path, info.offset, info.length)
    return (StorageInfo, place) if crc is None else (StorageInfo, place, {"crc": crc})


def dumps(metadata: Metadata) -> bytes:
    """The bytes of a `.metadata` file that torch ≥ 2.3 reads."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=4)
    pickler.dispatch_table = {
        **copyreg.dispatch_table,  # it has torch.layout
        TensorProperties: _reduce_properties,
        StorageInfo: _reduce_storage_info,
        # Most versions of Python pickle enumerations by value; some pickle `getattr`.
        MemoryFormatEncoding: lambda member: (MemoryFormatEncoding, (member.value,)),
    }
    with gc_paused():
        pickler.dump(metadata)
    pickled = buffer.getvalue()
    return pickled + trailer(pickled, len(pickled))
