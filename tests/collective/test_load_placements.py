"""`load` of every placement into every other, on meshes of other sizes and shapes, ranks reading for each other and
each for itself. One group of ranks does it all: subgroups of it are the jobs of fewer ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.ranks import on_ranks, run_ranks
from harness.states import StridedShard, assert_same, bits
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import vescale_ckpt

# A scalar, even, uneven, fewer rows than ranks, none at all, one dimension, more, and enough for several blocks.
SHAPES = [(), (16, 8), (7, 5), (1, 3), (0, 4), (11,), (3, 5, 4), (310, 601)]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]

WAYS_1D: list[tuple[Placement, ...]] = [
    (Replicate(),),
    (Shard(0),),
    (Shard(1),),
    (Shard(-1),),
    (StridedShard(0, split_factor=2),),
]
WAYS_2D: list[tuple[Placement, ...]] = [
    (Replicate(), Replicate()),
    (Replicate(), Shard(0)),
    (Shard(0), Replicate()),
    (Replicate(), Shard(-1)),
    (Shard(0), Shard(0)),
    (Shard(0), Shard(1)),
    (Shard(1), Shard(0)),
    (Shard(-1), Shard(-1)),
    (StridedShard(0, split_factor=2), Shard(0)),  # FSDP over tensor parallelism
    (StridedShard(0, split_factor=2), Replicate()),  # two runs of rows on each rank
    (StridedShard(1, split_factor=3), Shard(0)),
]

JOBS: dict[str, tuple[list[int] | list[list[int]], list[tuple[Placement, ...]]]] = {
    "one": ([0], WAYS_1D),
    "two": ([1, 2], WAYS_1D),
    "three": ([0, 1, 3], WAYS_1D),
    "four": ([0, 1, 2, 3], WAYS_1D),
    "grid": ([[0, 1], [2, 3]], WAYS_2D),
}
#: who saves, who loads, with which `broadcast_checkpoint`
LOADS = [
    ("four", "four", True), ("grid", "grid", True), ("four", "grid", True), ("grid", "four", False),
    ("grid", "three", True), ("two", "grid", False), ("one", "two", True), ("two", "three", False),
    ("three", "four", True), ("four", "three", False), ("two", "one", True),
]  # fmt: skip


class Job(NamedTuple):
    """Ranks that save or load together. Only they may use it."""

    mesh: DeviceMesh
    group: dist.ProcessGroup
    ways: list[tuple[Placement, ...]]
    sharded: dict[tuple[int, int], DTensor]  #: each of `SHAPES` in each of the ways


def _jobs() -> dict[str, Job]:
    """Those that this rank is in; all ranks make them together."""
    jobs = {}
    for name, (ranks, ways) in JOBS.items():
        mesh = DeviceMesh("cpu", ranks)
        members = mesh.mesh.flatten().tolist()
        group = dist.new_group(members)
        if dist.get_rank() in members:
            numbers = [(number, place) for number in range(len(SHAPES)) for place in range(len(ways))]
            sharded = {(number, place): _sharded(_full(number), mesh, ways[place]) for number, place in numbers}
            jobs[name] = Job(mesh, group, ways, sharded)
    return jobs


def _full(number: int) -> torch.Tensor:
    shape = SHAPES[number]
    return (torch.arange(math.prod(shape)) * 7 % 8191 + number).to(DTYPES[number % len(DTYPES)]).view(shape)


def _sharded(full: torch.Tensor, mesh: DeviceMesh, way: tuple[Placement, ...]) -> DTensor:
    dims = [way.dim for way in way if isinstance(way, Shard | StridedShard)]
    if not full.dim() or any(dim >= full.dim() for dim in dims):
        way = (Replicate(),) * len(way)
    return distribute_tensor(full, mesh, way, src_data_rank=None)


def _target(wanted: DTensor) -> DTensor:
    """One of zeros that is sharded alike; much faster to make than to distribute zeros."""
    local = torch.zeros_like(wanted.to_local())
    return DTensor.from_local(
        local, wanted.device_mesh, wanted.placements, run_check=False, shape=wanted.shape, stride=wanted.stride()
    )


def _save_all(directory: Path, job: Job) -> None:
    state = {f"{number} {place}": value for (number, place), value in job.sharded.items()}
    vescale_ckpt.save(directory, state, process_group=job.group)


def _load_all(directory: Path, job: Job, saved_ways: int, broadcast: bool) -> None:
    """Each key as each placement, a load for each of them: two keys of a load are never wanted alike."""
    for shift in range(len(job.ways)):
        state, expected = {}, {}
        for number in range(len(SHAPES)):
            for place in range(saved_ways):
                key = f"{number} {place}"
                expected[key] = job.sharded[number, (place + shift) % len(job.ways)]
                state[key] = _target(expected[key])
        report = vescale_ckpt.load(directory, state, broadcast_checkpoint=broadcast, process_group=job.group)
        assert report.missing == report.unexpected == report.mismatched == []
        for key, value in expected.items():
            assert state[key].placements == value.placements
            assert bits(state[key].to_local()) == bits(value.to_local()), (
                f"{directory.name} {key} -> {job.mesh.shape} {value.placements}, {tuple(value.shape)}, {broadcast=}"
            )


def _every_pair(directory: Path) -> list[str]:
    jobs = _jobs()
    for name, job in jobs.items():
        _save_all(directory / name, job)
    dist.barrier()
    for saver, loader, broadcast in LOADS:
        if loader in jobs:
            _load_all(directory / saver, jobs[loader], len(JOBS[saver][1]), broadcast)
    return list(jobs)


def test_every_placement_loads_into_every_other(tmp_path: Path) -> None:
    ran = run_ranks(4, _every_pair, tmp_path)
    assert set().union(*ran) == set(JOBS)


# --- What FSDP over tensor parallelism makes of a model


def _tp_model(mesh: DeviceMesh | None, features: int) -> torch.nn.Module:
    torch.manual_seed(features)
    model = torch.nn.Sequential(torch.nn.Linear(5, features), torch.nn.Tanh(), torch.nn.Linear(features, 3))
    if mesh is None:
        return model
    if mesh.ndim == 2:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        mesh = mesh["fsdp"]
    return fully_shard(model, mesh=mesh)


@on_ranks(4, timeout=120)
def test_fewer_rows_than_ranks_under_fsdp_over_tensor_parallelism(tmp_path: Path) -> None:
    """Some ranks hold (0, 0) where the placements mean (2, 0). Torch's own `full_tensor` hangs on such shards."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    for features in (1, 0):
        plain, module = _tp_model(None, features).state_dict(), _tp_model(grid, features)
        state = module.state_dict()
        locals_of = {name: value.to_local() for name, value in state.items()}
        saved = {name: value.clone() for name, value in locals_of.items()}
        ours, stock, written = (tmp_path / f"{features} {name}" for name in ("ours", "stock", "written"))
        vescale_ckpt.save(ours, {"model": module})
        dcp.save({"model": state}, checkpoint_id=stock)
        dcp.save({"model": state}, storage_writer=vescale_ckpt.StorageWriter(written))
        for path in (ours, stock, written):
            assert vescale_ckpt.verify(path).ok
            assert_same(vescale_ckpt.load(path)["model"], dict(plain), f"{path} -> plain")
            for by_stock in (False, True):
                for value in locals_of.values():
                    value.fill_(-1)
                if by_stock:
                    dcp.load({"model": state}, checkpoint_id=path)
                else:
                    vescale_ckpt.load(path, {"model": module})
                assert_same(locals_of, saved, f"{path}, {by_stock=}")
