"""`Checkpoint` says what a checkpoint of any format holds, and where, and reads it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch

from .._state.structure import Path, Structure
from .._state.tensor_table import narrowed
from ..errors import CheckpointError, CorruptCheckpointError


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk of a tensor, or an object, and the range of its record in a file."""

    offsets: tuple[int, ...]  #: in the tensor
    sizes: tuple[int, ...]
    file: str  #: its name, relative to the checkpoint's root
    offset: int  #: of the record; -1 if it is compressed, or part of one pickle
    bytes: int  #: of the record, framing included; -1 as above
    crc: int = -1  #: CRC-32 that reads compare: of the elements, the object, or the file's header; -1: none
    is_transformed: bool = False  #: whether a stream transform of stock DCP made the record


@dataclass(frozen=True)
class TensorInfo:
    """A stored tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: Sequence[Chunk] = ()  #: do not overlap

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def whole_in(file: str, shape: tuple[int, ...], dtype: torch.dtype, offset: int) -> TensorInfo:
    """A tensor that is whole in one file, without framing. `offset`: -1 if it is compressed there."""
    length = prod(shape) * dtype.itemsize if offset >= 0 else -1
    return TensorInfo(shape, dtype, [Chunk((0,) * len(shape), shape, file, offset, length)])


@dataclass(frozen=True)
class Read:
    """A box of a stored tensor, and the memory to read it into.

    The elements of a box are consecutive in the tensor, in C's order.
    """

    key: str
    offsets: Sequence[int]
    target: torch.Tensor  #: contiguous, in host memory, of the stored dtype and the box's sizes


class Checkpoint:
    """An open checkpoint, a base class. Formats of tensors alone, with flat names, have only `tensors` and `read`."""

    format: str  #: as `convert` names it
    path: str
    root: str  #: the directory that names of files are relative to
    is_of_one_rank: bool = False  #: whether others have saved the rest of its tensors, each for itself

    @cached_property
    def save_id(self) -> str:
        """The id of the save that wrote it; empty where the format has none."""
        return ""

    @cached_property
    def writer(self) -> str:
        """The software that wrote it, as far as its files tell."""
        return ""

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        raise NotImplementedError

    @cached_property
    def objects(self) -> Mapping[str, Chunk]:
        """Values that are no tensors."""
        return {}

    @cached_property
    def aliases(self) -> Mapping[str, str]:
        """Other names of stored tensors."""
        return {}

    @cached_property
    def paths(self) -> Mapping[str, Path]:
        """Paths in the nested state, by name; none for names of the top level."""
        return {}

    @cached_property
    def structure(self) -> Structure | None:
        """What paths do not contain; None: unknown."""
        return None

    @cached_property
    def malformed(self) -> Sequence[CheckpointError]:
        """An error for each key whose location makes no sense: it has no chunks."""
        return ()

    def check_malformed(self, key: str | None = None) -> None:
        """Raises the error of a malformed key; with None, of the first one."""
        for error in self.malformed:
            if key is None or getattr(error, "key", None) == key:
                raise error

    def check_whole(self) -> None:
        """Raises the first of `faults`."""
        for fault in self.faults():
            raise fault

    def faults(self) -> Iterator[CheckpointError]:
        """Malformed keys, and tensors that are not stored whole, unless one rank has saved them for itself."""
        yield from self.malformed
        if self.is_of_one_rank:
            return
        malformed = {getattr(error, "key", None) for error in self.malformed}
        for key, tensor in self.tensors.items():
            elements, wanted = sum(prod(chunk.sizes) for chunk in tensor.chunks), prod(tensor.shape)
            if elements != wanted and key not in malformed:
                reason = f"{key}: {elements} of its {wanted} elements are stored"
                yield CorruptCheckpointError(reason, key=key, file=self.described_in)

    @property
    def described_in(self) -> str:
        """The path of the file that says what it holds, for errors."""
        return self.path

    def file_names(self) -> list[str]:
        """The data files, relative to the root."""
        return list(dict.fromkeys(chunk.file for _, _, chunk in self.chunks()))

    def chunks(self) -> Iterator[tuple[str, torch.dtype, Chunk]]:
        """All chunks of tensors, and then all objects, as bytes; without malformed ones."""
        for key, tensor in self.tensors.items():
            for chunk in tensor.chunks:
                yield key, tensor.dtype, chunk
        for key, chunk in self.objects.items():
            if chunk.file:
                yield key, torch.uint8, chunk

    def load_objects(self, names: Iterable[str]) -> dict[str, Any]:
        """Loads objects, with `weights_only=True`: no code of the checkpoint runs."""
        return {}

    def read(self, reads: Sequence[Read]) -> None:
        """Fills the targets, and compares data with its checksums where the file has any.

        Raises `CorruptCheckpointError`, `UntrustedCheckpointError`, `CheckpointError`.
        """
        raise NotImplementedError

    def close(self) -> None: ...


def parts_of(chunks: Iterable[Chunk], read: Read) -> Iterator[tuple[Chunk, list[int], torch.Tensor]]:
    """For each chunk that overlaps the box: the overlap's offsets in the chunk, and the part of the target to fill.
    Stops when the box is complete.

    Raises `CorruptCheckpointError` if the chunks do not hold all of the box.
    """
    wanted = read.target.numel()
    for chunk in chunks:
        if not wanted:
            return
        begin = list(map(max, chunk.offsets, read.offsets))
        ends = zip(chunk.offsets, chunk.sizes, read.offsets, read.target.shape, strict=True)
        lengths = [min(a + m, b + n) - start for (a, m, b, n), start in zip(ends, begin, strict=True)]
        if any(length <= 0 for length in lengths):
            continue
        inside = [start - origin for start, origin in zip(begin, read.offsets, strict=True)]
        target = narrowed(read.target, inside, lengths)
        wanted -= target.numel()
        yield chunk, [start - origin for start, origin in zip(begin, chunk.offsets, strict=True)], target
    if wanted:
        raise not_all_there(read.key)


def cut(shape: tuple[int, ...], most_elements: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cuts a tensor into boxes that are contiguous and consecutive in its memory, of at most `most_elements` (at least
    1) elements. Yields offsets and sizes."""
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
    for number in range(shape[0]):
        for offsets, sizes in inner:
            yield (number, *offsets), (1, *sizes)


def not_all_there(key: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{key}: the checkpoint does not hold all of it that this rank needs", key=key, file=""
    )
