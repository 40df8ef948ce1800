"""Writes `.metadata` for every torch version, and reads it and its index for loads without running code from it.

The file is DCP's own pickle of `Metadata`. Two things differ from `pickle.dump` and `pickle.load`. Tensor properties
are written with the five fields that every torch reads (torch 2.15 writes six, which 2.13 cannot read), and read with
five or more. The reader imports only the classes that metadata consists of.
"""

from __future__ import annotations

import collections
import copyreg
import errno
import io
import math
import os
import pickle
import struct
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

from ..._engine import _C
from ..._engine.engine_errors import of_system
from ..._engine.gc import gc_paused
from ..._engine.rows import MOST_BYTES
from ..._engine.torch_private import MemoryFormatEncoding, StorageInfo
from ..._state.shard_chunks import overlapping_chunk
from ..._storage.open_storage import is_folder, read_twice, storage_at
from ...errors import CheckpointError, CorruptCheckpointError, UntrustedCheckpointError
from .file_names import METADATA_NAME, index_name, is_metadata_file, metadata_name, rank_of_metadata

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


NO_CHECKPOINT = "not a checkpoint, or one whose save did not finish"  #: ends the error for a missing metadata file
TRAILER_BYTES = 16
TRAILER_MAGIC = b"VSCKMDT1"


def _trailer(data: bytes, end: int) -> bytes:
    """Returns the trailer that this package writes behind the pickle, where unpicklers do not read: magic, low 32 bits
    of the pickle's length, its CRC-32. The pickle is the first `end` bytes of `data`."""
    return struct.pack("<8sII", TRAILER_MAGIC, end & 0xFFFFFFFF, _C.crc32(data, end))


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


def has_checksum(data: bytes) -> bool:
    """Whether `data` ends in the trailer that this package writes."""
    return data[-TRAILER_BYTES:].startswith(TRAILER_MAGIC)


def check_beginning(data: bytes, length: int, path: str) -> None:
    """Checks the first bytes of a `.metadata` file of `length` bytes, before memory is allocated for the rest. Raises
    as `loads` does."""
    wrong, end = _C.check_pickle(data)
    if not wrong and length > end + TRAILER_BYTES:
        raise CorruptCheckpointError(
            f"{path} is damaged: it has {length:,} bytes, its metadata ends after {end:,}", key=None, file=path
        )
    if wrong and not wrong.startswith("it ends"):
        check(data, path)


def check(data: bytes, path: str) -> None:
    """Checks the bytes of a `.metadata` file before anything is built from them. Raises as `loads` does."""
    wrong, end = _C.check_pickle(data)
    behind = len(data) - end  # it is 0 in files of stock DCP
    if not wrong and behind and (behind != TRAILER_BYTES or data[end:] != _trailer(data, end)):
        raise CorruptCheckpointError(f"{path} is damaged: its checksum does not match", key=None, file=path)
    if wrong.startswith("it ends"):
        raise CorruptCheckpointError(f"{path} is truncated: {wrong}", key=None, file=path)
    if wrong and not data.startswith(pickle.PROTO):
        raise CorruptCheckpointError(
            f"{path} is damaged, or no metadata: it does not begin as a pickle", key=None, file=path
        )
    if wrong:
        raise UntrustedCheckpointError(f"{path} is no sound metadata: {wrong}", path=path)


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
    return pickled + _trailer(pickled, len(pickled))


# --- Metadata files and indexes in a directory


def has_metadata(directory: str, rank: int | None) -> bool:
    return storage_at(directory).has(metadata_name(rank))


def metadata_ranks(directory: str) -> list[int | None]:
    """Returns the ranks whose metadata the directory holds: [None] for one metadata file of all ranks, otherwise the
    ranks that saved without collectives. Raises OSError."""
    ranks = {rank_of_metadata(name) for name in storage_at(directory).names() if is_metadata_file(name)}
    return [None] if None in ranks else sorted(ranks)  # type: ignore[type-var]


def read_metadata(directory: str, rank: int | None = None) -> Metadata:
    """Reads and checks the metadata of the checkpoint in a directory.

    Raises `CheckpointError` if there is none, `CorruptCheckpointError`, `UntrustedCheckpointError`.
    """
    return loads(metadata_bytes(directory, rank), os.path.join(directory, metadata_name(rank)))


def read_metadata_of(directory: str, rank: int | None, save_id: str) -> Metadata:
    """Reads the metadata that one save committed. Raises `CheckpointError` if a later save has replaced it."""
    metadata = read_metadata(directory, rank)
    if metadata.storage_meta is None or metadata.storage_meta.save_id != save_id:
        raise CheckpointError(f"the checkpoint in {directory} was replaced by a later save", path=directory)
    return metadata


def metadata_bytes(directory: str, rank: int | None) -> bytes:
    """Returns the bytes of the metadata file. Checks only their beginning; in an object store all of them. Raises as
    `read_metadata` does."""
    storage, name = storage_at(directory), metadata_name(rank)
    path = os.path.join(directory, name)

    def read() -> bytes:
        data = storage.read(name, lambda beginning, length: check_beginning(beginning, length, path))
        if storage.rereads:
            (check if has_checksum(data) else loads)(data, path)
        return data

    try:
        if not storage.stat(name).is_file:
            raise UntrustedCheckpointError(f"{path} is not a regular file", path=path)
        return read_twice(path, read)
    except FileNotFoundError:
        what = f"has no {name}" if is_folder(directory) else "is no directory"
        raise CheckpointError(f"{directory} {what}: {NO_CHECKPOINT}", path=directory, errno=errno.ENOENT) from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}", path=path, errno=error.errno) from error


def metadata_fingerprint(directory: str) -> str:
    """Returns a text that differs between the metadata of different saves: its length and its end, which holds a
    checksum. Empty if there is no metadata. Raises OSError if it cannot be read."""
    try:
        found, end = storage_at(directory).read_range(METADATA_NAME, -TRAILER_BYTES, TRAILER_BYTES)
    except FileNotFoundError:
        return ""
    # Files of stock DCP have no checksum, so their time counts: a copy on another disk has another fingerprint.
    known = "" if end.startswith(TRAILER_MAGIC) else f":{found.modified_ns}"
    return _fingerprint(found.size, end) + known


def fingerprint_of(data: bytes) -> str:
    """Returns the fingerprint of metadata of this package, from its bytes."""
    return _fingerprint(len(data), data[-TRAILER_BYTES:])


def _fingerprint(length: int, end: bytes) -> str:
    return f"{length}:{end.hex()}"


def read_index(directory: str, rank: int | None = None) -> _C.Index | None:
    """Returns the index of the checkpoint in a directory, or None if it has none that is sound and belongs to its
    metadata. Raises `CheckpointError` if an object store cannot be read: a read of the metadata would fail, too, after
    another long wait."""
    try:
        return _matching(open_index(directory, rank), directory, rank)
    except (OSError, _C.EngineError) as error:
        _check_is_harmless(error, directory)
        return None


def _check_is_harmless(error: OSError | _C.EngineError, directory: str) -> None:
    if isinstance(error, OSError) and not isinstance(error, FileNotFoundError) and storage_at(directory).can_be_away:
        raise of_system(error, directory) from error


def open_index(directory: str, rank: int | None) -> _C.Index:
    """Opens the index, whatever metadata it belongs to. Of a file, reads and checks only what is needed; reads an
    object whole."""
    path = os.path.join(directory, index_name(rank))
    if (storage := storage_at(directory)).by_requests:
        return _C.Index.from_bytes(storage.read(index_name(rank)), path)
    return _C.Index.open(path)


def index_bytes(directory: str) -> bytes | None:
    """Returns the bytes of the index and checks all of them. None where `read_index` returns None."""
    try:
        data = storage_at(directory).read(index_name(None))
        index = _C.Index.from_bytes(data, os.path.join(directory, index_name(None)))
        return None if _matching(index, directory, None) is None else data
    except (OSError, _C.EngineError) as error:
        _check_is_harmless(error, directory)
        return None


def _matching(index: _C.Index, directory: str, rank: int | None) -> _C.Index | None:
    found, end = storage_at(directory).read_range(metadata_name(rank), -TRAILER_BYTES, TRAILER_BYTES)
    return index if index.matches(end, found.size) else None
