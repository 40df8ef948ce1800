"""Computes which chunks of the whole tensor a rank's local DTensor holds, for inventories, from placements alone.

Each placement cuts one dimension of the part that the placements before it have left. `Shard` cuts it as `torch.chunk`
does; a strided shard (FSDP over tensor parallelism) cuts each of `split_factor` chunks separately. So a dimension of
the local tensor is a list of runs of the whole dimension, and the local tensor is the product of these lists. Torch
computes the same from index tensors as long as the dimension, and keeps only the first run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, product
from typing import NamedTuple

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from .._engine import torch_private
from .._engine.torch_private import DTensorLayout
from ..errors import CheckpointError
from .chunk_rows import ShardChunk


class _Cut(NamedTuple):
    """Divides each of `factor` chunks of a dimension into `parts`, and keeps the part with the index `kept` of each."""

    parts: int
    kept: int
    factor: int = 1


_KNOWN = (Replicate, Shard, torch_private.StridedShard)
_Run = tuple[int, int]  # start in the whole dimension, length > 0


def chunks_at(
    layout: DTensorLayout, mesh_shape: tuple[int, ...], coordinate: tuple[int, ...]
) -> tuple[ShardChunk, ...]:
    """Returns the chunks that make up the local tensor of the rank at `coordinate` of the mesh.

    A local tensor without elements is one chunk without elements. Raises `CheckpointError` for `Partial` and for
    placements that are not `are_known`.
    """
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
    return _chunks(tuple(layout.shape), tuple(map(tuple, cuts)))


def are_known(placements: Iterable[Placement]) -> bool:
    """Whether `chunks_at` knows or refuses all placements: those derived from others of torch are left to torch. Calls
    no method of a placement: one whose class leaves the C++ part of `Placement` uninitialised ends the process."""
    return all(type(placement) in _KNOWN or not isinstance(placement, _KNOWN) for placement in placements)


def local_shape(found: Sequence[ShardChunk]) -> tuple[int, ...]:
    """Returns the shape of the local tensor that consists of these chunks. There must be at least one."""
    last = found[-1]
    return tuple(start + size for start, size in zip(last.local_offset, last.size, strict=True))


def _mesh_dims_in_order(layout: DTensorLayout) -> Iterable[int]:
    """Returns the mesh dimensions in the order in which their placements apply. It matters only for placements that cut
    the same dimension."""
    if layout.shard_order is None:
        return range(len(layout.placements))
    ordered = [mesh_dim for entry in layout.shard_order for mesh_dim in entry.mesh_dims]
    return ordered + [mesh_dim for mesh_dim in range(len(layout.placements)) if mesh_dim not in ordered]


def _factor(placement: Placement) -> int:
    if type(placement) is Shard:
        return 1
    if type(placement) is torch_private.StridedShard:
        return int(placement.split_factor)
    if isinstance(placement, Partial):
        raise CheckpointError(
            f"its values are partial sums ({placement}): redistribute it before it is saved or loaded"
        )
    raise CheckpointError(f"its placement {placement} is not known: redistribute it to Shard or Replicate")


@lru_cache(maxsize=4096)  # layers repeat: a few shapes and placements make up a model
def _chunks(shape: tuple[int, ...], cuts: tuple[tuple[_Cut, ...], ...]) -> tuple[ShardChunk, ...]:
    runs = [_runs(size, dim_cuts) for size, dim_cuts in zip(shape, cuts, strict=True)]
    lengths = tuple(sum(length for _, length in dim_runs) for dim_runs in runs)
    if 0 in lengths:
        offset = tuple(dim_runs[0][0] if dim_runs else size for dim_runs, size in zip(runs, shape, strict=True))
        return (ShardChunk(offset, lengths, (0,) * len(shape)),)
    found = []
    for chunk in product(*map(_with_local_starts, runs)):
        offset, size, local = zip(*chunk, strict=True) if chunk else ((), (), ())
        found.append(ShardChunk(offset, size, local))
    return tuple(found)


def _with_local_starts(runs: list[_Run]) -> list[tuple[int, int, int]]:
    local_starts = accumulate((length for _, length in runs), initial=0)
    return [(*run, at) for run, at in zip(runs, local_starts, strict=False)]


def _runs(size: int, cuts: Sequence[_Cut]) -> list[_Run]:
    """Returns the runs of a dimension that all cuts leave, in their order in the local tensor."""
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
    """Returns begin and end of chunk `index` of the `parts` chunks of `torch.chunk`. The last chunks may be empty."""
    whole = -(-length // parts)
    return min(length, whole * index), min(length, whole * (index + 1))


def _take(runs: list[_Run], ranges: list[tuple[int, int]]) -> list[_Run]:
    """Returns the runs at the indices `ranges`, counted over the elements of all `runs`. Ranges rise. Adjacent runs are
    joined."""
    taken: list[_Run] = []
    run, at = 0, 0  # the current run, and the index of its first element
    for begin, end in ranges:
        while begin < end:
            start, length = runs[run]
            if begin >= at + length:
                run, at = run + 1, at + length
                continue
            stop = min(end, at + length)
            first, count = start + begin - at, stop - begin
            if taken and sum(taken[-1]) == first:
                taken[-1] = taken[-1][0], taken[-1][1] + count
            else:
                taken.append((first, count))
            begin = stop
    return taken
