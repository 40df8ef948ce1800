"""Defines what a conversion needs from a checkpoint of any format: `Source`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any

import torch

from .._read.match import not_all_there
from .._state.structure import Path, Structure
from .._state.tensor_table import narrowed


@dataclass(frozen=True)
class TensorInfo:
    """A stored tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Read:
    """A box of a stored tensor, and the memory to read it into.

    The elements of a box are consecutive in the tensor, in C's order.
    """

    key: str
    offsets: Sequence[int]
    target: torch.Tensor  #: contiguous, in host memory, of the stored dtype and the box's sizes


def parts_of(
    chunks: Sequence[tuple[Sequence[int], Sequence[int]]], read: Read
) -> Iterator[tuple[int, list[int], torch.Tensor]]:
    """For each chunk (offsets and sizes in the tensor) that overlaps the box: its number, the overlap's offsets in the
    chunk, and the part of the target to fill. Stops when the box is complete; chunks must not overlap each other.

    Raises `CorruptCheckpointError` if they do not hold all of the box.
    """
    wanted = read.target.numel()
    for number, (offsets, sizes) in enumerate(chunks):
        if not wanted:
            return
        begin = list(map(max, offsets, read.offsets))
        ends = zip(offsets, sizes, read.offsets, read.target.shape, strict=True)
        lengths = [min(a + m, b + n) - start for (a, m, b, n), start in zip(ends, begin, strict=True)]
        if any(length <= 0 for length in lengths):
            continue
        inside = [start - origin for start, origin in zip(begin, read.offsets, strict=True)]
        target = narrowed(read.target, inside, lengths)
        wanted -= target.numel()
        yield number, [start - origin for start, origin in zip(begin, offsets, strict=True)], target
    if wanted:
        raise not_all_there(read.key)


class Source:
    """An open checkpoint, a base class. Formats of tensors alone, with flat names, have only `tensors` and `read`."""

    tensors: dict[str, TensorInfo]
    format: str  #: as `convert` names it
    object_names: Sequence[str] = ()
    paths: Mapping[str, Path] = MappingProxyType({})  #: in the nested state, by name; none for names of the top level
    structure: Structure | None = None  #: what paths do not contain; None: unknown

    def objects(self, names: Iterable[str]) -> dict[str, Any]:
        """Loads objects, with `weights_only=True`: no code of the checkpoint runs."""
        return {}

    def location(self, key: str) -> tuple[str, int, int]:
        """The path of the file that holds a tensor, and the offset and length of its bytes there; -1 for both if they
        are compressed. Only of formats whose tensors are whole in one file, without framing."""
        raise NotImplementedError

    def read(self, reads: Sequence[Read]) -> None:
        """Fills the targets, and compares data with its checksums where the file has any.

        Raises `CorruptCheckpointError`, `UntrustedCheckpointError`, `CheckpointError`.
        """
        raise NotImplementedError

    def close(self) -> None: ...
