"""`LoadableCheckpoint` gives loads the index or DCP's metadata to plan with, of a native or safetensors checkpoint.

`RecordReader` reads the records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from .._engine import _C
from .._engine.torch_private import StorageInfo
from .._state.stacking import Stack
from .._state.structure import Structure, structure_of
from ..errors import CheckpointError, CorruptCheckpointError, UntrustedCheckpointError
from .checkpoint import Checkpoint, Chunk, Read, overlaps_of
from .quantized_tensors import Quantized
from .record_reader import RecordReader
from .seen_files import SeenFiles


class LoadableCheckpoint(Checkpoint):
    """A checkpoint that `load` accepts. Its pickle leaves out the index."""

    def __init__(self, path: str, root: str, read_metadata: Callable[[], Metadata], index: _C.Index | None) -> None:
        """`read_metadata`: called when `metadata` is first asked for."""
        self.path = path
        self.root = root
        self.read_metadata = read_metadata
        self.index = index
        self._seen = SeenFiles()  # `read` uses it

    def __getstate__(self) -> dict[str, Any]:
        aliases = dict(self.aliases)
        return {"path": self.path, "root": self.root, "aliases": aliases, "metadata": self.metadata, "index": None}

    def with_metadata(self, metadata: Metadata, index: _C.Index | None) -> LoadableCheckpoint:
        """Returns the same checkpoint with other metadata, which a user's code may have changed."""
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__, read_metadata=lambda: metadata, metadata=metadata, index=index)
        return other

    def stacked(self, stack: Stack) -> LoadableCheckpoint:
        """Returns the checkpoint with the tensors that rules make of the stored ones. Raises ValueError and
        `CheckpointError` for rules that do not fit it."""
        raise CheckpointError(
            f"stack: {self.path} is of format {self.format!r}, and loads stack tensors of safetensors files only: make "
            "a checkpoint of stacked tensors with vescale_ckpt.convert(..., stack=...), and load that",
            path=self.path,
        )

    def stored_key(self, file: str, offset: int) -> str | None:
        """The stored key of what lies at a place of a file; None if rules have changed no keys."""
        return None

    @cached_property
    def metadata(self) -> Metadata:
        return self.read_metadata()

    def places(self) -> tuple[object, Structure | None]:
        """The path of each key in the state that was saved, as the checkpoint has them, and the record of its kinds."""
        return self.metadata.planner_data, structure_of(self.metadata)

    def keys(self) -> list[str]:
        if self.index is not None:
            with suppress(_C.EngineError):  # the index is damaged: the metadata is read
                return self.index.keys()
        return list(self.metadata.state_dict_metadata)

    def stored_bytes(self) -> int:
        """Returns the sum of bytes in all data files, as far as index or metadata know."""
        if self.index is not None:
            with suppress(_C.EngineError):
                return sum(self.index.file_ends())
        lengths = (getattr(info, "length", 0) for info in self.metadata.storage_data.values())
        return sum(length for length in lengths if type(length) is int)

    # --- By DCP's items

    def location(self, index: MetadataIndex) -> StorageInfo:
        """Returns the record location of a chunk or an object. Everything except the file's name is checked."""
        key = index.fqn
        info = self.metadata.storage_data.get(index)
        if info is None:
            raise CorruptCheckpointError(
                f"{key}: the metadata of {self.path} does not say where it is stored", key=key, file=self.path
            )
        return check_location(info, key)

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
        """{key: {offset: chunk}} of tensors whose items give a wrong index of the chunk."""
        return {}

    # --- By chunks

    @property
    def quantized(self) -> Mapping[str, Quantized]:
        """The tensors whose values are made of stored numbers and scales, by their keys."""
        return {}

    def parts(self, reads: Iterable[Read]) -> Iterator[Part]:
        """Yields the parts of chunks that fill the targets of `reads`."""
        for read in reads:
            self.check_malformed(read.key)
            info = self.tensors[read.key]
            for chunk, inside, target in overlaps_of(info.chunks, read):
                yield Part(read.key, info.dtype, chunk, inside, target)


class Part(NamedTuple):
    """A part of a chunk to read."""

    key: str
    dtype: torch.dtype
    chunk: Chunk
    inside: list[int]  #: offsets in the chunk
    target: torch.Tensor


def fill_parts(reader: RecordReader, parts: Iterable[Part]) -> None:
    reader.fill(
        reader.target(reader.record(part.key, part.chunk, part.dtype), part.inside, part.target) for part in parts
    )
    reader.finish()


def check_location(info: object, key: str) -> StorageInfo:
    """Returns a record location from metadata. Raises `UntrustedCheckpointError` unless its types and ranges are sound.
    Does not check the file's name."""
    if type(info) is not StorageInfo or type(getattr(info, "relative_path", None)) is not str:
        raise UntrustedCheckpointError(f"{key}: metadata does not name a file for it", key=key)
    for name in ("offset", "length"):
        number = getattr(info, name, None)
        if type(number) is not int or not 0 <= number < 1 << 62:
            raise UntrustedCheckpointError(f"{key}: metadata gives {number!r} as its {name}", key=key)
    return info


def refused_transform(key: str) -> UntrustedCheckpointError:
    """The error for a record of a stream transform of stock DCP, which code that the checkpoint names undoes."""
    return UntrustedCheckpointError(
        f"{key}: it was stored through a stream transform (compression), which only stock DCP undoes: load it with "
        "torch's FileSystemReader and save it again",
        key=key,
    )


def crc_of(info: StorageInfo) -> int:
    """The CRC-32 that saves of this package add to a record location; -1 if it has none."""
    crc = getattr(info, "crc", -1)
    return crc if type(crc) is int and 0 <= crc < 1 << 32 else -1
