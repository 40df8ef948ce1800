"""What a checkpoint looks like to a conversion, whatever its format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .._state.structure import Path


@dataclass(frozen=True)
class TensorInfo:
    """A tensor that is stored."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Read:
    """A box of a stored tensor, and where it goes.

    Boxes are such that their elements follow one another in a contiguous tensor of C's order.
    """

    key: str
    offsets: Sequence[int]
    target: torch.Tensor  #: contiguous, in host memory, of the stored dtype and the box's sizes


def parts_of(
    chunks: Sequence[tuple[Sequence[int], Sequence[int]]], read: Read
) -> Iterator[tuple[int, list[int], torch.Tensor]]:
    """What each chunk (offsets and sizes in the tensor) holds of a box: its number, where in the chunk that begins, and
    the part of the target for it. Nothing for a box without elements. Ends where chunks that do not overlap can have
    no more."""
    wanted = read.target.numel()
    for number, (offsets, sizes) in enumerate(chunks):
        if not wanted:
            return
        begin = list(map(max, offsets, read.offsets))
        ends = zip(offsets, sizes, read.offsets, read.target.shape, strict=True)
        lengths = [min(a + m, b + n) - start for (a, m, b, n), start in zip(ends, begin, strict=True)]
        if any(length <= 0 for length in lengths):
            continue
        target = read.target
        for dim, (start, origin, length) in enumerate(zip(begin, read.offsets, lengths, strict=True)):
            target = target.narrow(dim, start - origin, length)
        wanted -= target.numel()
        yield number, [start - origin for start, origin in zip(begin, offsets, strict=True)], target


class Source(Protocol):
    """A checkpoint that is open."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    @property
    def object_names(self) -> Sequence[str]: ...

    @property
    def paths(self) -> Mapping[str, Path]:
        """By name what it stands for in a nested state; nothing for names of the top level."""

    def objects(self, names: Iterable[str]) -> dict[str, Any]:
        """Loads these. Nothing is built that torch does not consider harmless."""

    def read(self, reads: Sequence[Read]) -> None:
        """Fills the targets. What comes from the file is compared with its checksums, where it has any.

        Raises `CorruptCheckpointError`, `UntrustedCheckpointError`, `CheckpointError`.
        """

    def close(self) -> None: ...
