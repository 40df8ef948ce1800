"""`Checkpoint` lists what a checkpoint of any format holds, and where, and reads it for all other packages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError, CorruptCheckpointError
from ..reports import SavedBy

if TYPE_CHECKING:
    import torch

    from .._state.structure import Path, Structure


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk of a tensor, or an object, and the range of its record in a file."""

    offsets: tuple[int, ...]  #: the first element in the tensor
    sizes: tuple[int, ...]
    file: str  #: name relative to the checkpoint's root
    offset: int  #: position of the record in the file; -1 if it is part of a pickle
    bytes: int  #: length of the record, framing included; -1 in the same case
    crc: int = -1  #: CRC-32 that reads compare, of the elements, the object, or the file's header; -1: none


@dataclass(frozen=True)
class TensorInfo:
    """A stored tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: Sequence[Chunk] = ()  #: they do not overlap

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Read:
    """A chunk to read of a stored tensor, and the memory to read it into.

    The elements of the chunk are consecutive in the tensor, in C's order.
    """

    key: str
    offsets: Sequence[int]
    target: torch.Tensor  #: contiguous host memory of the stored dtype, with the shape of the chunk


PlacedChunk = tuple[str, "torch.dtype", Chunk]  #: with its key, and its tensor's dtype


class Checkpoint:
    """The base class of open checkpoints. Formats that hold only tensors, with flat names, override only `tensors` and
    `read`."""

    format: str  #: the name that `convert` uses
    path: str
    root: str  #: names of files are relative to this directory
    is_of_one_rank: bool = False  #: whether other ranks have saved the rest of its tensors, each for itself
    quantization_config: str | None = None  #: of the model, as JSON; empty if it has none, None where no file would say
    aliases: Mapping[str, str] = {}  #: other names of stored tensors
    ties: Mapping[str, str] = {}  #: {key: first key} of tensors whose records are the first key's, as of tied weights

    @cached_property
    def save_id(self) -> str:
        """The id of the save that wrote it; empty where the format has none."""
        return ""

    @cached_property
    def saved_by(self) -> SavedBy | None:
        """When and by what it was saved; None if that is not recorded."""
        return None

    @cached_property
    def writer(self) -> str:
        """The software that wrote it, as far as its files tell."""
        return ""

    @property
    def is_node_part(self) -> bool:
        """Whether it is in the folder of one node, and other nodes may have files that are missing."""
        return False

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        raise NotImplementedError

    @cached_property
    def objects(self) -> Mapping[str, Chunk]:
        """Values that are no tensors."""
        return {}

    def keys(self) -> list[str]:
        return [*self.tensors, *self.objects, *self.aliases]

    @cached_property
    def paths(self) -> Mapping[str, Path]:
        """{name: path in the nested state}, without names of the top level."""
        return {}

    @cached_property
    def structure(self) -> Structure | None:
        """The facts about the nested state that paths leave out; None: unknown."""
        return None

    @cached_property
    def malformed(self) -> Sequence[CheckpointError]:
        """One error for each key with an invalid location, or records that loads refuse. Such a key has no chunks."""
        return ()

    def check_malformed(self, key: str | None = None) -> None:
        """Raises the error of a malformed key; with None, of the first one."""
        for error in self.malformed:
            if key is None or getattr(error, "key", None) == key:
                raise error

    def faults(self) -> Iterator[CheckpointError]:
        """Yields errors of malformed keys, and of tensors that are not stored whole unless one rank saved for
        itself."""
        yield from self.malformed
        if self.is_of_one_rank:
            return
        malformed = {getattr(error, "key", None) for error in self.malformed}
        for key, tensor in self.tensors.items():
            elements, expected = sum(prod(chunk.sizes) for chunk in tensor.chunks), prod(tensor.shape)
            if elements != expected and key not in malformed:
                reason = f"{key}: {elements} of its {expected} elements are stored"
                yield CorruptCheckpointError(reason, key=key, file=self.described_in)

    @property
    def described_in(self) -> str:
        """The path of the file with the checkpoint's metadata, for errors."""
        return self.path

    def file_names(self) -> list[str]:
        """The data files, relative to the root."""
        return list(dict.fromkeys(chunk.file for _, _, chunk in self.chunks()))

    @cached_property
    def chunks_by_file(self) -> Mapping[str, Sequence[PlacedChunk]]:
        """All chunks, as `chunks` yields them, by the names of their files."""
        found: dict[str, list[PlacedChunk]] = {}
        for placed in self.chunks():
            found.setdefault(placed[2].file, []).append(placed)
        return found

    def chunks(self) -> Iterator[PlacedChunk]:
        """Yields all chunks of tensors, and then all objects as bytes, without malformed ones."""
        import torch

        for key, tensor in self.tensors.items():
            for chunk in tensor.chunks:
                yield key, tensor.dtype, chunk
        for key, chunk in self.objects.items():
            if chunk.file:
                yield key, torch.uint8, chunk

    def checksum(self, chunk: Chunk) -> int:
        """Returns the CRC-32 of the elements of a tensor's chunk in C's order, without reading them; -1: not known. Two
        records of wrapper subclasses have the same CRC-32 if their archives are equal."""
        return -1

    def load_objects(self, names: Iterable[str]) -> dict[str, Any]:
        """Loads objects, with `weights_only=True`: no code of the checkpoint runs."""
        return {}

    def read(self, reads: Sequence[Read]) -> None:
        """Fills the targets, and compares data with checksums if the file has any.

        Raises `CorruptCheckpointError`, `UntrustedCheckpointError`, `CheckpointError`.
        """
        raise NotImplementedError

    def close(self) -> None: ...


def overlaps_of(chunks: Iterable[Chunk], read: Read) -> Iterator[tuple[Chunk, list[int], torch.Tensor]]:
    """Yields each chunk that overlaps the read, the overlap's offsets in the chunk, and the part of the target to fill.
    Stops when the target is complete.

    Raises `CorruptCheckpointError` if the chunks do not fill the target.
    """
    from .._state.tensor_table import narrowed  # it imports torch, which listings need not

    missing = read.target.numel()
    for chunk in chunks:
        if not missing:
            return
        begin = list(map(max, chunk.offsets, read.offsets))
        ends = zip(chunk.offsets, chunk.sizes, read.offsets, read.target.shape, strict=True)
        lengths = [min(a + m, b + n) - start for (a, m, b, n), start in zip(ends, begin, strict=True)]
        if any(length <= 0 for length in lengths):
            continue
        inside = [start - origin for start, origin in zip(begin, read.offsets, strict=True)]
        target = narrowed(read.target, inside, lengths)
        missing -= target.numel()
        yield chunk, [start - origin for start, origin in zip(begin, chunk.offsets, strict=True)], target
    if missing:
        raise incomplete_tensor(read.key)


def cut(shape: tuple[int, ...], most_elements: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cuts a tensor into chunks of at most `most_elements` elements (at least 1). Each is contiguous in the tensor's
    memory, and they follow each other. Yields offsets and sizes."""
    if prod(shape) <= most_elements:
        yield (0,) * len(shape), shape
        return
    row = prod(shape[1:])
    if row <= most_elements:
        step = most_elements // row
        rest = (0,) * (len(shape) - 1)
        for start in range(0, shape[0], step):
            yield (start, *rest), (min(step, shape[0] - start), *shape[1:])
        return
    inner = list(cut(shape[1:], most_elements))
    for index in range(shape[0]):
        for offsets, sizes in inner:
            yield (index, *offsets), (1, *sizes)


def incomplete_tensor(key: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{key}: the checkpoint does not hold all of it that this rank needs", key=key, file=""
    )
