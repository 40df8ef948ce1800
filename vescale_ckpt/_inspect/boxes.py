"""Streams the values of stored tensors in bounded memory, for `diff`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from .._checkpoint.checkpoint import Checkpoint, Read, cut

GROUP_BYTES = 64 << 20  #: bytes of targets that one call reads from each source


@dataclass(frozen=True)
class _Box:
    key: str
    offsets: Sequence[int]
    sizes: Sequence[int]


def values(
    sources: Sequence[Checkpoint], keys: Sequence[str], progress: Callable[[int, int], None] | None = None
) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """The values of tensors, piece by piece: the key, and the piece as a flat tensor of each source's dtype.

    Tensors of a key have the same shape in all sources. Pieces of a key follow each other; a tensor without elements
    has one piece. The memory of a piece is used again for the next one. Raises the errors of `Checkpoint.read`.

    `progress`: called with the bytes of the first source so far and in total.
    """
    done, total = 0, sum(sources[0].tensors[key].bytes for key in keys)
    for group in _groups(sources, keys):
        of_sources = [_read(source, group) for source in sources]
        for number, box in enumerate(group):
            pieces = [targets[number].reshape(-1) for targets in of_sources]
            yield box.key, pieces
            done += pieces[0].nbytes
            if progress is not None:
                progress(done, total)


def _groups(sources: Sequence[Checkpoint], keys: Iterable[str]) -> Iterator[list[_Box]]:
    group: list[_Box] = []
    held = 0
    for key in keys:
        info = sources[0].tensors[key]
        itemsize = max(source.tensors[key].dtype.itemsize for source in sources)
        for offsets, sizes in cut(info.shape, max(1, GROUP_BYTES // itemsize)):
            count = torch.Size(sizes).numel() * itemsize
            if group and held + count > GROUP_BYTES:
                yield group
                group, held = [], 0
            group.append(_Box(key, offsets, sizes))
            held += count
    if group:
        yield group


def _read(source: Checkpoint, group: Sequence[_Box]) -> list[torch.Tensor]:
    targets = [torch.empty(tuple(box.sizes), dtype=source.tensors[box.key].dtype, device="cpu") for box in group]
    source.read([Read(box.key, box.offsets, target) for box, target in zip(group, targets, strict=True)])
    return targets


def as_numbers(piece: torch.Tensor) -> torch.Tensor:
    """The values as float64, or complex128. Raises TypeError for packed dtypes, whose values torch cannot tell."""
    if piece.is_complex():
        return piece.to(torch.complex128)
    try:
        return piece.to(torch.float64)
    except (RuntimeError, NotImplementedError):  # float8 of some kinds goes through float32 only
        try:
            return piece.to(torch.float32).to(torch.float64)
        except (RuntimeError, NotImplementedError) as error:
            raise TypeError(f"torch has no values of {piece.dtype}") from error
