"""Computes statistics of stored tensors: range, mean, norm, and how many values are zero, NaN or infinite."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass

import torch

from .._checkpoint.open_checkpoint import open_checkpoint
from .._state.key_selection import Selection
from .._storage.open_storage import readable_path
from .boxes import as_numbers, values


@dataclass
class TensorStats:
    """Statistics of one tensor. `min`, `max`, `mean` and `norm` are of its finite values; of complex values, of their
    magnitudes. None where there are no finite values."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    elements: int = 0
    min: float | None = None
    max: float | None = None
    mean: float | None = None
    norm: float | None = None  #: Euclidean
    zeros: int = 0
    nan: int = 0
    inf: int = 0
    unknown: bool = False  #: torch cannot tell the values of the dtype

    @property
    def sound(self) -> bool:
        return not (self.nan or self.inf)


def stats(
    path: str | os.PathLike[str],
    keys: str | Iterable[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[TensorStats]:
    """The statistics of each tensor of a checkpoint of any format, in bounded memory, verified while it is read.

    Args:
        keys: which keys: names, prefixes up to a dot, or `fnmatch` patterns; with `!` before it, all but these.
        progress: called with the bytes read so far and in total.

    Raises `MissingKeysError` for `keys` that match nothing, and the errors of reading: `CorruptCheckpointError`,
    `UntrustedCheckpointError`, `CheckpointError`.
    """
    with closing(open_checkpoint(readable_path(path))) as source:
        selection = Selection(keys)
        selection.check([*source.tensors, *source.objects])
        found: dict[str, _Sums] = {}
        for key, (piece,) in values([source], [key for key in source.tensors if key in selection], progress):
            info = source.tensors[key]
            sums = found.setdefault(key, _Sums(TensorStats(key, str(info.dtype).removeprefix("torch."), info.shape)))
            sums.add(piece)
        return [sums.result() for sums in found.values()]


class _Sums:
    """Statistics of the pieces so far."""

    def __init__(self, of: TensorStats) -> None:
        self._of = of
        self._finite = 0
        self._sum = self._squares = 0.0
        self._least, self._most = math.inf, -math.inf

    def add(self, piece: torch.Tensor) -> None:
        of = self._of
        of.elements += piece.numel()
        try:
            numbers = as_numbers(piece)
        except TypeError:
            of.unknown = True
            return
        if numbers.is_complex():
            numbers = numbers.abs()
        finite = numbers[torch.isfinite(numbers)]
        of.nan += int(torch.isnan(numbers).sum())
        of.inf += int(torch.isinf(numbers).sum())
        of.zeros += int((numbers == 0).sum())
        if finite.numel():
            self._finite += finite.numel()
            self._sum += float(finite.sum())
            # hypot of norms: squares of large values would overflow
            self._squares = math.hypot(self._squares, float(torch.linalg.vector_norm(finite)))
            self._least = min(self._least, float(finite.min()))
            self._most = max(self._most, float(finite.max()))

    def result(self) -> TensorStats:
        of = self._of
        if self._finite:
            of.min, of.max = self._least, self._most
            of.mean, of.norm = self._sum / self._finite, self._squares
        return of
