"""Writes `.metadata` for every torch version, and reads it without running code from it.

The file is DCP's own pickle of `Metadata`. Two things differ from `pickle.dump` and `pickle.load`. Tensor properties
are written with the five fields that every torch reads (torch 2.15 writes six, which 2.13 cannot read), and read with
five or more. The reader imports only the classes that metadata consists of.
"""

from __future__ import annotations

import collections
import copyreg
import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ..._engine.gc import gc_paused
from ..._engine.rows import MOST_BYTES
from ..._engine.torch_private import MemoryFormatEncoding, StorageInfo
from ..._state.chunk_rows import overlapping_chunk
from ...errors import CorruptCheckpointError, UntrustedCheckpointError
from .metadata_check import check, trailer

# DCP metadata of any torch version has only these classes.
_METADATA_CLASSES = {
    name: getattr(dcp_metadata, name)
    for name in (
        "Metadata",
        "MetadataIndex",
        "ChunkStorageMetadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "StorageMeta",
    )
}
_PROPERTIES_MODULES = (dcp_metadata.__name__, "torch.distributed._shard.sharded_tensor.metadata")  # torch < 2.3
_DTYPES = {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


class _LenientProperties(TensorProperties):
    """Takes the state of any torch version: five fields. Ignores further fields."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if not isinstance(state, tuple) or len(state) < 5:
            raise UntrustedCheckpointError("tensor properties in .metadata are malformed")
        self.__class__ = TensorProperties  # type: ignore[assignment]
        TensorProperties.__init__(self, dtype=state[0], layout=state[1], requires_grad=state[2], pin_memory=state[4])


def _get_layout(name: str) -> torch.layout:
    layout = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(layout, torch.layout):
        raise UntrustedCheckpointError(f".metadata names an unknown tensor layout {name!r}")
    return layout


def _memory_format(number: int) -> None:
    """Replaces the enumeration of memory formats, a field that torch no longer uses."""


def _memory_format_named(enumeration: Any, name: Any) -> None:
    """Replaces `getattr`, with which Python 3.11.0 to 3.11.3 pickle members of enumerations."""
    if enumeration is not _memory_format or type(name) is not str:
        raise UntrustedCheckpointError(".metadata asks for an attribute of something that is no memory format: refused")


def _plain_path(*parts: str) -> str:
    """Replaces pathlib's classes, which stock files have in `storage_meta.checkpoint_id`. The path is not used."""
    if sum(map(len, parts)) + len(parts) > 4096:
        raise UntrustedCheckpointError(".metadata holds a path that is longer than 4096 characters")
    return "/".join(parts)


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module in _PROPERTIES_MODULES and name == "TensorProperties":
            return _LenientProperties
        if module in _PROPERTIES_MODULES and name.removeprefix("_") == "MEM_FORMAT_ENCODING":
            return _memory_format
        if module == dcp_metadata.__name__ and name in _METADATA_CLASSES:
            return _METADATA_CLASSES[name]
        if module == "torch.distributed.checkpoint.filesystem" and name == "_StorageInfo":
            return StorageInfo
        if module == "torch" and name == "Size":
            return torch.Size
        if module == "torch" and name in _DTYPES:
            return getattr(torch, name)
        if module == "torch.serialization" and name == "_get_layout":
            return _get_layout
        if module == "collections" and name == "OrderedDict":
            return collections.OrderedDict
        if module in ("builtins", "__builtin__") and name == "getattr":
            return _memory_format_named
        if module.startswith("pathlib") and name.endswith("Path"):
            return _plain_path
        raise UntrustedCheckpointError(
            f".metadata asks to import {module}.{name}, which checkpoint metadata never needs: refused",
            module=module,
            name=name,
        )


def loads(data: bytes, path: str) -> Metadata:
    """Reads the bytes of a `.metadata` file. `path` is for messages only.

    Raises `UntrustedCheckpointError` for imports that metadata never needs, and `CorruptCheckpointError` if the bytes
    are no metadata.
    """
    check(data, path)
    with gc_paused():
        try:
            metadata = _MetadataUnpickler(io.BytesIO(data)).load()
        except UntrustedCheckpointError:
            raise
        except Exception as error:  # a damaged pickle raises nearly anything
            raise CorruptCheckpointError(
                f"{path} is damaged: {type(error).__name__}: {error}", key=None, file=path
            ) from error
    if type(metadata) is not Metadata or type(getattr(metadata, "state_dict_metadata", None)) is not dict:
        raise CorruptCheckpointError(f"{path} holds no checkpoint metadata", key=None, file=path)
    with gc_paused():
        try:
            for key, stored in metadata.state_dict_metadata.items():
                _check_entry(key, stored)
        except UntrustedCheckpointError as error:
            named = getattr(error, "key", None)
            raise UntrustedCheckpointError(f"{error.message} (in {path})", key=named, path=path) from error.__cause__
    return metadata


def _check_entry(key: Any, stored: Any) -> None:
    """Checks that a tensor's chunks lie in it and do not overlap.

    The load itself checks that the chunks cover what it needs: the metadata of one rank that saved without collectives
    has only that rank's chunks.
    """
    if type(key) is not str:
        raise UntrustedCheckpointError(f"metadata has {key!r} as a name")
    if type(stored) is not TensorStorageMetadata:
        if type(stored) is not BytesStorageMetadata:
            raise UntrustedCheckpointError(f"{key}: metadata describes it as {type(stored).__name__}", key=key)
        return
    try:
        size, chunks = stored.size, stored.chunks
        dtype = stored.properties.dtype
        if not isinstance(dtype, torch.dtype) or type(size) is not torch.Size:
            raise UntrustedCheckpointError(f"{key}: metadata gives no dtype or no shape", key=key)
        if math.prod(size) * dtype.itemsize >= MOST_BYTES or (size and min(size) < 0):
            raise UntrustedCheckpointError(f"{key}: no tensor of {dtype} has the shape {tuple(size)}", key=key)
        _check_chunks(key, size, chunks)
    except (AttributeError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise UntrustedCheckpointError(f"{key}: metadata is malformed: {error}", key=key) from error


def _check_chunks(key: str, size: torch.Size, chunks: list[ChunkStorageMetadata]) -> None:
    for number, chunk in enumerate(chunks):
        if type(chunk.offsets) is tuple and type(chunk.sizes) is tuple:  # stock DCP saves Megatron-FSDP's state so
            chunks[number] = chunk = ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
        if type(chunk.offsets) is not torch.Size or type(chunk.sizes) is not torch.Size:
            raise UntrustedCheckpointError(f"{key}: metadata gives a chunk without offset or shape", key=key)
        if len(chunk.offsets) != len(size) or len(chunk.sizes) != len(size):
            raise UntrustedCheckpointError(f"{key}: a chunk has another number of dimensions than the tensor", key=key)
        for offset, length, limit in zip(chunk.offsets, chunk.sizes, size, strict=True):
            if not 0 <= offset <= limit < MOST_BYTES or not 0 <= length <= limit - offset:
                raise UntrustedCheckpointError(
                    f"{key}: a chunk of {tuple(chunk.sizes)} at {tuple(chunk.offsets)} leaves its tensor of "
                    f"{tuple(size)}",
                    key=key,
                )
    if overlapping_chunk([(chunk.offsets, chunk.sizes) for chunk in chunks if math.prod(chunk.sizes)]) is not None:
        raise UntrustedCheckpointError(f"{key}: chunks in metadata overlap", key=key)


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


class _MetadataPickler(pickle.Pickler):
    """Writes metadata's classes as calls of their constructors, and equal shapes and properties once.

    Without sharing, copies of the same few shapes would be half of a large `.metadata`, and half of the time to write.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=4)
        shared: dict[Any, Any] = {}

        def share(value: Any) -> Any:
            return shared.setdefault(value, value)

        def share_properties(value: TensorProperties) -> TensorProperties:
            key = (value.dtype, value.layout, value.requires_grad, value.pin_memory)
            properties: TensorProperties = shared.setdefault(key, value)
            return properties

        self.dispatch_table: dict[type, Callable[[Any], Any]] = {
            **copyreg.dispatch_table,  # it has torch.layout
            TensorProperties: _reduce_properties,
            MetadataIndex: lambda v: (MetadataIndex, (v.fqn, share(v.offset), v.index)),
            ChunkStorageMetadata: lambda v: (ChunkStorageMetadata, (share(v.offsets), share(v.sizes))),
            TensorStorageMetadata: lambda v: (
                TensorStorageMetadata,
                (share_properties(v.properties), share(v.size), v.chunks),
            ),
            StorageInfo: _reduce_storage_info,
            # Most versions of Python pickle enumerations by value; some pickle `getattr`.
            MemoryFormatEncoding: lambda v: (MemoryFormatEncoding, (v.value,)),
        }


def dumps(metadata: Metadata) -> bytes:
    """The bytes of a `.metadata` file that torch ≥ 2.3 reads."""
    buffer = io.BytesIO()
    with gc_paused():
        _MetadataPickler(buffer).dump(metadata)
    pickled = buffer.getvalue()
    return pickled + trailer(pickled, len(pickled))
