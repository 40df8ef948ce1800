"""Which boxes of the whole tensor a rank's local tensor holds, in closed form.

A placement cuts one dimension of what the placements before it left: `Shard` as `torch.chunk` does, a strided shard
(FSDP over tensor parallelism) every one of `split_factor` chunks by itself. So a dimension of a local tensor is a list
of runs of the whole one, and the local tensor the product of those lists. Torch finds the same by cutting up index
tensors as long as the dimension, and keeps only the first run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from .._engine import torch_private
from .._engine.torch_private import DTensorLayout
from ..errors import CheckpointError


class Piece(NamedTuple):
    """A box of a tensor, as elements by dimension."""

    offset: tuple[int, ...]  #: in the whole tensor
    size: tuple[int, ...]
    local_offset: tuple[int, ...]  #: in the local tensor


class _Cut(NamedTuple):
    """Keeps one of `parts` chunks of a dimension, or one of each of its `factor` chunks."""

    parts: int
    kept: int
    factor: int = 1


_Run = tuple[int, int]  # start in the whole dimension, length > 0


def pieces_of(dtensor: DTensor) -> tuple[Piece, ...]:
    """The boxes that this rank's local tensor consists of; none where the rank is not in the mesh.

    A local tensor without elements is one box without elements. Raises `CheckpointError` for placements that are no
    layout of values: `Partial`, and those not known here.
    """
    (layout,) = torch_private.dtensor_layouts([dtensor])
    coordinate = layout.mesh.get_coordinate()
    return () if coordinate is None else pieces(layout, tuple(layout.mesh.shape), tuple(coordinate))


def pieces(layout: DTensorLayout, mesh_shape: tuple[int, ...], coordinate: tuple[int, ...]) -> tuple[Piece, ...]:
    """As `pieces_of`, at any coordinate of the mesh."""
    cuts: list[list[_Cut]] = [[] for _ in layout.shape]
    for mesh_dim in _mesh_dims_in_order(layout):
        placement = layout.placements[mesh_dim]
        if type(placement) is Replicate:
            continue
        factor = _factor(placement)
        dim: int = placement.dim  # type: ignore[attr-defined]
        if not 0 <= dim < len(cuts):
            raise CheckpointError(f"a tensor of shape {tuple(layout.shape)} cannot be sharded by {placement}")
        cuts[dim].append(_Cut(mesh_shape[mesh_dim], coordinate[mesh_dim], factor))
    return _pieces(tuple(layout.shape), tuple(map(tuple, cuts)))


def local_shape(found: Sequence[Piece]) -> tuple[int, ...]:
    """The shape of the local tensor that consists of such pieces, of which there is at least one."""
    last = found[-1]
    return tuple(start + size for start, size in zip(last.local_offset, last.size, strict=True))


def _mesh_dims_in_order(layout: DTensorLayout) -> Iterable[int]:
    """In which order placements apply. Only the order of those that cut the same dimension matters."""
    if layout.shard_order is None:
        return range(len(layout.placements))
    ordered = [mesh_dim for entry in layout.shard_order for mesh_dim in entry.mesh_dims]
    return ordered + [mesh_dim for mesh_dim in range(len(layout.placements)) if mesh_dim not in ordered]


def _factor(placement: Placement) -> int:
    if type(placement) is Shard:
        return 1
    if type(placement) is torch_private.StridedShard:
        return int(placement.split_factor)
    if placement.is_partial():
        raise CheckpointError(
            f"its values are partial sums ({placement}): redistribute it before it is saved or loaded"
        )
    raise CheckpointError(f"its placement {placement} is not known: redistribute it to Shard or Replicate")


@lru_cache(maxsize=4096)  # layers repeat: a few shapes and placements make up a model
def _pieces(shape: tuple[int, ...], cuts: tuple[tuple[_Cut, ...], ...]) -> tuple[Piece, ...]:
    runs = [_runs(size, dim_cuts) for size, dim_cuts in zip(shape, cuts, strict=True)]
    lengths = tuple(sum(length for _, length in dim_runs) for dim_runs in runs)
    if 0 in lengths:
        offset = tuple(dim_runs[0][0] if dim_runs else size for dim_runs, size in zip(runs, shape, strict=True))
        return (Piece(offset, lengths, (0,) * len(shape)),)
    found = []
    for box in product(*map(_with_local_starts, runs)):
        offset, size, local = zip(*box, strict=True) if box else ((), (), ())
        found.append(Piece(offset, size, local))
    return tuple(found)


def _with_local_starts(runs: list[_Run]) -> list[tuple[int, int, int]]:
    starts, at = [], 0
    for start, length in runs:
        starts.append((start, length, at))
        at += length
    return starts


def _runs(size: int, cuts: Sequence[_Cut]) -> list[_Run]:
    """What is left of a dimension, in the order in which it lies in the local tensor."""
    runs = [(0, size)] if size else []
    for cut in cuts:
        length = sum(length for _, length in runs)
        kept = []
        for outer in range(cut.factor):
            begin, end = _chunk(length, cut.factor, outer)
            inner_begin, inner_end = _chunk(end - begin, cut.parts, cut.kept)
            kept.append((begin + inner_begin, begin + inner_end))
        runs = _take(runs, kept)
    return runs


def _chunk(length: int, parts: int, index: int) -> tuple[int, int]:
    """Where the `index`-th of `parts` chunks of `torch.chunk` begins and ends; the last ones may be empty."""
    whole = -(-length // parts)
    return min(length, whole * index), min(length, whole * (index + 1))


def _take(runs: list[_Run], ranges: list[tuple[int, int]]) -> list[_Run]:
    """What rising ranges of positions in `runs` cover, neighbours joined."""
    taken: list[_Run] = []
    number, at = 0, 0  # the run at hand, and the position of its first element
    for begin, end in ranges:
        while begin < end:
            start, length = runs[number]
            if begin >= at + length:
                number, at = number + 1, at + length
                continue
            stop = min(end, at + length)
            first, count = start + begin - at, stop - begin
            if taken and sum(taken[-1]) == first:
                taken[-1] = taken[-1][0], taken[-1][1] + count
            else:
                taken.append((first, count))
            begin = stop
    return taken
