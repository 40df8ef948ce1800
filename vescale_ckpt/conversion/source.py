"""What a checkpoint looks like to a conversion, whatever its format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..flatten import Path


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
