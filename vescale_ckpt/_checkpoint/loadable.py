"""`LoadableCheckpoint` gives loads the index or DCP's metadata to plan with, of a native or safetensors checkpoint.

`RecordReader` reads the records.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .._engine import _C
from .._engine.torch_types import is_tensor_metadata
from .._state.structure import Structure, structure_of
from .._storage.paths import check_relative
from ..errors import CheckpointError, CorruptCheckpointError, UntrustedCheckpointError
from .checkpoint import Checkpoint, Chunk, Read, overlaps_of
from .load_index import LoadIndex, index_of, refused_transform
from .non_contiguous_records import stored_class
from .record_reader import RecordReader, Target
from .seen_files import SeenFiles
from .stacking import Stack

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata


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
        other.__dict__.pop("load_index", None)
        return other

    def check_places(self) -> None:
        """Raises `CorruptCheckpointError` if neither index nor metadata have record locations."""
        if self.index is None and not isinstance(self.metadata.storage_data, dict):
            raise CorruptCheckpointError(
                f"the metadata of {self.path} does not say where anything is stored", key=None, file=self.path
            )

    def check_size(self, key: str) -> None:
        """Raises `UntrustedCheckpointError` if a tensor is larger than its records, or went through a stream transform,
        before memory is allocated for it."""
        from torch.distributed.checkpoint.metadata import MetadataIndex

        stored, places = self.metadata.state_dict_metadata[key], self.metadata.storage_data
        if not is_tensor_metadata(stored):
            return
        infos_by_index: Mapping[Any, Any] = places if isinstance(places, dict) else {}
        infos = [infos_by_index.get(MetadataIndex(key, chunk.offsets)) for chunk in stored.chunks]
        if any(getattr(info, "transform_descriptors", None) for info in infos):
            raise refused_transform(key)
        lengths = (getattr(info, "length", None) for info in infos)
        room = sum(length for length in lengths if type(length) is int and length > 0)
        elements = stored.size.numel()
        needed = elements * stored.properties.dtype.itemsize
        # Records of wrapper subclasses may take less than their values do: at least a bit each.
        if needed > room and not (elements <= 8 * room and all(self._holds_wrapper(key, info) for info in infos)):
            raise UntrustedCheckpointError(
                f"{key}: metadata claims {needed:,} bytes for it, but its records have only {room:,}", key=key
            )

    def _holds_wrapper(self, key: str, info: Any) -> bool:
        if info is None:
            return True
        path = os.path.join(self.root, check_relative(info.relative_path, key))
        return stored_class(path, info.offset, info.length) != ""

    @cached_property
    def load_index(self) -> LoadIndex:
        """What loads are planned on."""
        return index_of(self.metadata, self.path) if self.index is None else LoadIndex(self.index)

    def without_index(self) -> LoadableCheckpoint:
        """Returns the checkpoint as its metadata describe it, if the index is damaged."""
        return self.with_metadata(self.metadata, None)

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

    # --- By chunks

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
    reader.fill(targets_of(reader, parts))
    reader.finish()


def targets_of(reader: RecordReader, parts: Iterable[Part]) -> Iterator[Target]:
    for part in parts:
        yield reader.target(reader.record(part.key, part.chunk, part.dtype), part.inside, part.target)
