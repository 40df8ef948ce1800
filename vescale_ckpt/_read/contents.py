"""Reads what a checkpoint holds, native or safetensors, from its index or its metadata, for loads and `verify`."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from .._checkpoint.native import metadata_file
from .._checkpoint.native.file_names import INDEX_NAME, METADATA_NAME, checked_location, is_metadata_file
from .._checkpoint.safetensors import headers
from .._checkpoint.safetensors.headers import SafetensorsContents
from .._engine import _C
from .._engine.errors import named_errors, of_system
from .._engine.torch_private import StorageInfo
from .._ranks.message import pack, unpack
from .._storage.open_storage import is_file, says_nothing, storage_at
from ..errors import CorruptCheckpointError
from .no_checkpoint import explained

_MOST_INDEX_BYTES = 16 << 20  # a larger index is not sent: each rank reads the few pages that it needs


@dataclass(frozen=True, eq=False)
class Contents:
    """What one checkpoint holds. Pickles without the index."""

    path: str  #: of the checkpoint
    root: str  #: the directory that names of files are relative to
    read_metadata: Callable[[], Metadata]  #: called when `metadata` is first asked for
    index: _C.Index | None = None
    safetensors: bool = False  #: whether its files are safetensors
    aliases: frozenset[str] = frozenset()  #: keys that are other names of stored keys: loaded only if asked for

    def __reduce__(self) -> tuple[Any, ...]:
        return _of_metadata, (self.path, self.root, self.metadata, self.safetensors, self.aliases)

    @cached_property
    def metadata(self) -> Metadata:
        return self.read_metadata()

    @property
    def save_id(self) -> str:
        """The id of the save that wrote it; empty if there is none."""
        if self.index is not None:
            return self.index.save_id
        told = getattr(self.metadata.storage_meta, "save_id", None)
        return told if isinstance(told, str) else ""

    def keys(self) -> list[str]:
        if self.index is not None:
            with suppress(_C.EngineError):  # the index is damaged: the metadata is read
                return self.index.keys()
        return list(self.metadata.state_dict_metadata)

    def stored_bytes(self) -> int:
        """The bytes that are stored in all data files, as far as index or metadata know."""
        if self.index is not None:
            with suppress(_C.EngineError):
                return sum(self.index.file_ends())
        lengths = (getattr(info, "length", 0) for info in self.metadata.storage_data.values())
        return sum(length for length in lengths if type(length) is int)

    def location(self, index: MetadataIndex) -> StorageInfo:
        """The record location of a chunk or an object, checked except for the file's name."""
        key = index.fqn
        info = self.metadata.storage_data.get(index)
        if info is None:
            raise CorruptCheckpointError(
                f"{key}: the metadata of {self.path} does not say where it is stored", key=key, file=self.path
            )
        return checked_location(info, key)

    def chunk(self, index: MetadataIndex) -> tuple[torch.dtype, torch.Size]:
        """Dtype and shape of a stored chunk."""
        stored = self.metadata.state_dict_metadata.get(index.fqn)
        if not isinstance(stored, TensorStorageMetadata):
            raise CorruptCheckpointError(
                f"{index.fqn}: the metadata of {self.path} holds no tensor of that name", key=index.fqn, file=self.path
            )
        chunks = stored.chunks
        chunk = chunks[index.index] if index.index is not None and 0 <= index.index < len(chunks) else None
        if chunk is None or chunk.offsets != index.offset:
            by_offset = self._chunks.get(index.fqn)
            if by_offset is None:
                by_offset = self._chunks[index.fqn] = {tuple(chunk.offsets): chunk for chunk in chunks}
            offset = tuple(index.offset) if index.offset is not None else (0,) * len(stored.size)
            chunk = by_offset.get(offset)
            if chunk is None:
                raise CorruptCheckpointError(
                    f"{index.fqn}: the metadata of {self.path} has no chunk at {offset}", key=index.fqn, file=self.path
                )
        return stored.properties.dtype, chunk.sizes

    @cached_property
    def _chunks(self) -> dict[str, dict[Any, ChunkStorageMetadata]]:
        """Chunks by key and offset, of tensors whose items give a wrong number of the chunk."""
        return {}


def is_safetensors(path: str) -> bool:
    """Whether `path` is a checkpoint of safetensors files, by its names alone. Raises `CheckpointError` if an object
    store cannot tell."""
    if metadata_file.has_metadata(path, None):  # first: many ranks call this, and to list a large directory is slow
        return False
    try:
        names = storage_at(path).names()
        return any(name.endswith(headers.SUFFIXES) for name in names) and not any(map(is_metadata_file, names))
    except NotADirectoryError:
        return is_file(path)
    except OSError as error:
        if storage_at(path).can_be_away and says_nothing(error.errno, path):
            raise of_system(error, path) from error
        return False


def read(path: str, rank: int | None, verify: bool, *, by_index: bool = True) -> Contents:
    """The contents of the checkpoint at `path`; with `rank`, of what that rank saved without collectives.

    `verify`: checks safetensors headers. Raises `CheckpointError` if there is no checkpoint, `CorruptCheckpointError`,
    `UntrustedCheckpointError`.
    """
    if rank is None and is_safetensors(path):
        return of_safetensors(path, SafetensorsContents.read(path, verify))
    index = metadata_file.read_index(path, rank) if by_index else None
    if index is None:
        with explained(path):
            return _of_metadata(path, path, metadata_file.read_metadata(path, rank))
    return _of_index(path, rank, index)


def mark(path: str) -> str:
    """A text that differs between saves, read cheaply; empty if there is no checkpoint. Raises OSError."""
    if is_safetensors(path):
        return headers.mark(path)
    return metadata_file.metadata_mark(path)


def packed(path: str, verify: bool) -> bytes:
    """The contents as bytes for other ranks: the index, or all metadata if there is no index. Empty if the index is so
    large that each rank should read what it needs of it."""
    if is_safetensors(path):
        return pack(b"", b"", SafetensorsContents.read(path, verify).pack())
    with suppress(OSError):
        if storage_at(path).stat(INDEX_NAME).size > _MOST_INDEX_BYTES:
            return b""
    index = metadata_file.index_bytes(path)
    if index is not None:
        return pack(index, b"", b"")
    with explained(path):
        return pack(b"", metadata_file.metadata_bytes(path, None), b"")


def unpacked(path: str, message: bytes) -> Contents:
    """The contents that another rank `packed`, of the same checkpoint. Raises as `read` does."""
    index, metadata, safetensors = unpack(message)
    if safetensors:
        return of_safetensors(path, SafetensorsContents.unpack(path, safetensors))
    file = os.path.join(path, METADATA_NAME)
    if not index:
        return _of_metadata(path, path, metadata_file.loads(metadata, file))
    file = os.path.join(path, INDEX_NAME)
    with named_errors(str, file):  # only damage on the way can raise: the coordinator checked it
        return _of_index(path, None, _C.Index.from_bytes(index, f"{file}, as the coordinator sent it,"))


def _of_index(path: str, rank: int | None, index: _C.Index) -> Contents:
    # Only metadata of the index's save will do: a later save may replace it during the load.
    return Contents(path, path, lambda: metadata_file.read_metadata_of(path, rank, index.save_id), index)


def of_safetensors(path: str, found: SafetensorsContents) -> Contents:
    return Contents(path, found.root, found.metadata, found.index(), True, found.aliases)


def _of_metadata(
    path: str, root: str, metadata: Metadata, safetensors: bool = False, aliases: frozenset[str] = frozenset()
) -> Contents:
    return Contents(path, root, lambda: metadata, None, safetensors, aliases)
