"""A process as the only rank, or as one of thousands that do not exist, and what such a rank holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.planning.models import Entry
from benchmarks.planning.simulated_job import Parallelism, coordinate
from vescale_ckpt._engine.torch_private import DTensorLayout
from vescale_ckpt._state.shard_chunks import chunks_at, local_shape

_Result = TypeVar("_Result")


def in_new_process(function: Callable[..., _Result], *arguments: Any) -> _Result:
    """Calls it where there is no process group yet, and nothing cached."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


@contextmanager
def alone() -> Iterator[None]:
    """As the only rank of a process group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def simulated_rank(ranks: int, rank: int) -> Iterator[None]:
    """As one rank of a process group whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def state_of(entries: Sequence[Entry], parallelism: Parallelism) -> dict[str, Any]:
    """What this rank holds, in memory that nobody touches."""
    meshes: dict[tuple[int, ...], DeviceMesh] = {}
    rank = dist.get_rank()
    state: dict[str, Any] = {}
    for entry in entries:
        if entry.dtype is None:
            state[entry.name] = 0
            continue
        placed = parallelism.mesh_and_placements(entry)
        if placed is None:
            state[entry.name] = torch.empty(entry.shape, dtype=entry.dtype)
            continue
        shape, placements = placed
        if shape not in meshes:
            meshes[shape] = init_device_mesh("cpu", shape)
        layout = DTensorLayout(placements, meshes[shape], torch.Size(entry.shape))
        local = torch.empty(local_shape(chunks_at(layout, shape, coordinate(rank, shape))), dtype=entry.dtype)
        stride = torch.empty(entry.shape, device="meta").stride()
        state[entry.name] = DTensor.from_local(
            local, layout.mesh, placements, run_check=False, shape=layout.shape, stride=stride
        )
    return state
