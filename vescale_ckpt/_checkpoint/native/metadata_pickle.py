"""Writes `.metadata` for every torch version, and reads it without running code from it.

The file is DCP's own pickle of `Metadata`. Two things differ from `pickle.dump` and `pickle.load`. Tensor properties
are written with the five fields that every torch reads (torch 2.15 writes six, which 2.13 cannot read), and read with
five or more. The reader imports only the classes that metadata consists of.
"""

from __future__ import annotations

import collections
import copyreg
import dataclasses
import io
import math
import pickle
import re
from itertools import product
from operator import ne
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
from ..._state import structure
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
#: Classes with an object for each tensor or record.
_OF_RECORDS = (MetadataIndex, ChunkStorageMetadata, TensorStorageMetadata, BytesStorageMetadata, StorageInfo)
_PROPERTIES_MODULES = (dcp_metadata.__name__, "torch.distributed._shard.sharded_tensor.metadata")  # torch < 2.3
_DTYPES = {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
#: The modules of classes that plans consist of. Only attributes that no load needs may hold their objects.
_PLANS = ("torch.distributed.checkpoint.", "megatron.core.dist_checkpointing.", "nvidia_resiliency_ext.checkpointing.")
_FIELDS = {*(field.name for field in dataclasses.fields(Metadata)), structure.ATTRIBUTE}


class _StandIn:
    """Replaces an object of a plan: accepts any arguments and any state, and drops them."""

    def __init__(self, *_: Any) -> None: ...

    def __setstate__(self, _: Any) -> None: ...


class _Unused(Exception):
    """Replaces objects that a reader does not need. Exceptions accept any arguments without running Python code."""


class _LenientProperties(TensorProperties):
    """Takes the state of any torch version: five fields. Ignores further fields."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if not isinstance(state, tuple) or len(state) < 5:
            raise pickle.UnpicklingError("tensor properties are malformed")
        self.__class__ = TensorProperties  # type: ignore[assignment]
        TensorProperties.__init__(self, dtype=state[0], layout=state[1], requires_grad=state[2], pin_memory=state[4])


def _get_layout(name: str) -> torch.layout:
    layout = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(layout, torch.layout):
        raise pickle.UnpicklingError(f"it names an unknown tensor layout {name!r}")
    return layout


def _memory_format(number: int) -> None:
    """Replaces the enumeration of memory formats, a field that torch no longer uses."""


def _memory_format_named(enumeration: Any, name: Any) -> None:
    """Replaces `getattr`, with which Python 3.11.0 to 3.11.3 pickle members of enumerations."""
    if isinstance(enumeration, type) and issubclass(enumeration, _StandIn):
        return
    if enumeration is not _memory_format or type(name) is not str:
        raise _refused("builtins", "getattr")


def _plain_path(*parts: str) -> str:
    """Replaces pathlib's classes, which stock files have in `storage_meta.checkpoint_id`. The path is not used."""
    if sum(map(len, parts)) + len(parts) > 4096:
        raise pickle.UnpicklingError("it holds a path that is longer than 4096 characters")
    return "/".join(parts)


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module in _PROPERTIES_MODULES and name == "TensorProperties":
            return _LenientProperties
        if module in _PROPERTIES_MODULES and name.removeprefix("_") == "MEM_FORMAT_ENCODING":
            return _memory_format
        if module == dcp_metadata.__name__ and name in _METADATA_CLASSES:
            return _METADATA_CLASSES[name]
        if name == "_StorageInfo":  # OLMo-core has a class of its own, with the same fields
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
        if module.startswith("megatron.core.dist_checkpointing.") and name == "MCoreMetadata":  # Megatron < 0.15
            return Metadata
        if module.startswith(_PLANS) and module != dcp_metadata.__name__ and re.fullmatch(r"_?[A-Z]\w*", name):
            return type(name, (_StandIn,), {"__module__": module})
        if (meant := _one_byte_away(f"{module}.{name}")) is not None:
            raise pickle.UnpicklingError(f"it names {module}.{name} in the place of {meant}")
        raise _refused(module, name)


class _PlacesUnpickler(_MetadataUnpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        return _Unused if found in _OF_RECORDS else found


def _refused(module: str, name: str) -> UntrustedCheckpointError:
    return UntrustedCheckpointError(
        f".metadata asks to import {module}.{name}, which checkpoint metadata never needs: refused. If nobody tampered "
        "with the file, it is damaged",
        module=module,
        name=name,
    )


def _one_byte_away(name: str) -> str | None:
    """The name of metadata that a flipped byte turned into `name`. None if there is none."""
    known = [
        *(f"{dcp_metadata.__name__}.{each}" for each in _METADATA_CLASSES),
        *map(".".join, product(_PROPERTIES_MODULES, ("TensorProperties", "_MEM_FORMAT_ENCODING"))),
        *(f"torch.{each}" for each in ("Size", "serialization._get_layout", *_DTYPES)),
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "torch.distributed.checkpoint.planner.SavePlan",
        "pathlib.PosixPath",
    ]
    return next((each for each in known if len(each) == len(name) and sum(map(ne, each, name)) == 1), None)


def loads(data: bytes, path: str, *, of_places: bool = False) -> Metadata:
    """Reads the bytes of a `.metadata` file. `path` is for messages only. Drops attributes that no load needs.
    `of_places`: leaves out what describes tensors and records, for readers with an index, which take half the time.

    Raises `UntrustedCheckpointError` for imports that metadata never needs and for tensors of impossible sizes, and
    `CorruptCheckpointError` if the bytes are no sound metadata.
    """
    check(data, path)
    with gc_paused():
        try:
            metadata = (_PlacesUnpickler if of_places else _MetadataUnpickler)(io.BytesIO(data)).load()
        except UntrustedCheckpointError:
            raise
        except Exception as error:  # a damaged pickle raises nearly anything
            raise CorruptCheckpointError(
                f"{path} is damaged: {type(error).__name__}: {error}", key=None, file=path
            ) from error
    if type(metadata) is not Metadata or type(getattr(metadata, "state_dict_metadata", None)) is not dict:
        raise CorruptCheckpointError(f"{path} holds no checkpoint metadata", key=None, file=path)
    for name in vars(metadata).keys() - _FIELDS:
        delattr(metadata, name)
    if of_places:
        metadata.state_dict_metadata, metadata.storage_data = {}, None
        return metadata
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
    elif isinstance(paths, (_StandIn, list)):
        metadata.planner_data = None


def _check_entry(key: Any, stored: Any) -> None:
    """Checks that a tensor's chunks lie in it and do not overlap. Raises nearly anything if they do not.

    The load itself checks that the chunks cover what it needs: the metadata of one rank that saved without collectives
    has only that rank's chunks.
    """
    if type(key) is not str:
        raise ValueError("it is no name")
    if isinstance(stored, _StandIn):
        raise _refused(type(stored).__module__, type(stored).__name__)
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
