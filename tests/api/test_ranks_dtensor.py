"""Sharded tensors on several ranks: every placement saved, every other loaded, by us and by stock DCP."""

from __future__ import annotations

import itertools
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.ranks import on_ranks, run_ranks
from harness.states import assert_same, bits
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    TensorStorageMetadata,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from vescale_ckpt import LoadPlanner, SavePlanner, StorageReader, StorageWriter

# Even, uneven, fewer rows than ranks, nothing at all, more dimensions, and parts that cross blocks of checksums.
SHAPES = [(16, 8), (5, 7), (1, 3), (2, 2), (0, 4), (3, 5, 4), (1030, 700)]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8]

PLACEMENTS_1D: list[list[Placement]] = [[Shard(0)], [Shard(1)], [Replicate()]]
SAVERS: dict[str, tuple[Any, Any]] = {
    "ours": (StorageWriter, SavePlanner),
    "stock": (FileSystemWriter, DefaultSavePlanner),
}
LOADERS: dict[str, tuple[Any, Any]] = {
    "ours": (StorageReader, LoadPlanner),
    "stock": (FileSystemReader, DefaultLoadPlanner),
}
# Who saves and who loads. Stock with stock would test nothing of ours.
PAIRS = [("ours", "ours"), ("ours", "stock"), ("stock", "ours")]


def full_tensor(number: int) -> torch.Tensor:
    """The value of the `number`-th tensor of a state, equal on all ranks."""
    shape, dtype = SHAPES[number % len(SHAPES)], DTYPES[number % len(DTYPES)]
    return (torch.arange(math.prod(shape)) * 7 + number).to(dtype).reshape(shape)


def sharded_state(mesh: DeviceMesh, placements: list[Placement], zeros: bool = False) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for number in range(len(SHAPES)):
        value = full_tensor(number)
        state[f"{number}"] = distribute_tensor(
            torch.zeros_like(value) if zeros else value, mesh, placements, src_data_rank=None
        )
    return state


def save_by(who: str, path: str, state: dict[str, Any], **options: Any) -> Any:
    writer, planner = SAVERS[who]
    return dcp.save(state, storage_writer=writer(path, sync_files=False), planner=planner(), **options)


def load_by(who: str, path: str, state: dict[str, Any], **options: Any) -> Any:
    reader, planner = LOADERS[who]
    reader = reader(path)
    dcp.load(state, storage_reader=reader, planner=planner(), **options)
    return reader


def assert_same_shards(actual: dict[str, Any], expected: dict[str, Any], where: str) -> None:
    assert actual.keys() == expected.keys(), where
    for key, value in expected.items():
        assert actual[key].placements == value.placements
        assert bits(actual[key].to_local()) == bits(value.to_local()), f"{where}: {key}, {tuple(value.shape)}"


def _save_sharded(path: str, saver: str, placements: list[Placement]) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = sharded_state(mesh, placements) | {"plain": torch.arange(100), "object": {"step": 7}}
    save_by(saver, path, state)


def _load_sharded(path: str, loader: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for placements in PLACEMENTS_1D:
        target = sharded_state(mesh, placements, zeros=True)
        others: dict[str, Any] = {"plain": torch.zeros(100, dtype=torch.int64), "object": {"step": 0}}
        load_by(loader, path, target | others)
        assert_same_shards(target, sharded_state(mesh, placements), str(placements))
        assert_same(others, {"plain": torch.arange(100), "object": {"step": 7}})


@pytest.mark.parametrize("pair", PAIRS[1:], ids="-to-".join)
@pytest.mark.parametrize(("ranks_before", "ranks_after"), [(4, 2), (1, 4)])
def test_another_number_of_ranks(tmp_path: Path, ranks_before: int, ranks_after: int, pair: tuple[str, str]) -> None:
    for number, placements in enumerate(PLACEMENTS_1D):
        path = str(tmp_path / str(number))
        run_ranks(ranks_before, _save_sharded, path, pair[0], placements)
        run_ranks(ranks_after, _load_sharded, path, pair[1])


@on_ranks(4)
def test_metadata_equals_stock_metadata(tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    state = sharded_state(mesh, [Replicate(), Shard(0)])
    state |= {f"plain {i}": torch.full((i,), i) for i in range(20)} | {"nested": {"list": [torch.ones(2), {"x": 1}]}}
    ours = save_by("ours", f"{tmp_path}/ours", state)
    stock = save_by("stock", f"{tmp_path}/stock", state)
    assert ours.state_dict_metadata.keys() == stock.state_dict_metadata.keys()
    for key, expected in stock.state_dict_metadata.items():
        found = ours.state_dict_metadata[key]
        if isinstance(expected, TensorStorageMetadata):  # chunks are sorted, without empty ones, and may be cut
            assert (found.properties, found.size) == (expected.properties, expected.size)
            for metadata in (found, expected):
                assert sum(chunk.sizes.numel() for chunk in metadata.chunks) == expected.size.numel()
        else:
            assert found == expected
    assert ours.planner_data == stock.planner_data
    assert set(os.listdir(f"{tmp_path}/ours")) == {".metadata", ".metadata.index"} | {
        info.relative_path for info in ours.storage_data.values()
    }


@pytest.mark.parametrize("pair", PAIRS[1:], ids="-to-".join)
@on_ranks(4)
def test_mesh_of_some_ranks(tmp_path: Path, pair: tuple[str, str]) -> None:
    saver, loader = pair
    path = str(tmp_path / "c")
    mesh = DeviceMesh("cpu", [1, 2])  # ranks 0 and 3 hold nothing of it
    value = torch.arange(50.0).view(10, 5)
    inside = mesh.get_coordinate() is not None
    state: dict[str, Any] = {"everywhere": torch.ones(3)}
    target: dict[str, Any] = {"everywhere": torch.zeros(3)}
    state["a"] = distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None)
    target["a"] = distribute_tensor(torch.zeros(10, 5), mesh, [Shard(1)], src_data_rank=None)
    save_by(saver, path, state)
    load_by(loader, path, target)
    assert_same(target["everywhere"], torch.ones(3))
    if inside:
        assert_same(target["a"].to_local(), value.tensor_split(2, 1)[mesh.get_local_rank()])
    whole = {"a": torch.zeros(10, 5)}
    load_by(loader, path, whole)
    assert_same(whole["a"], value)


# --- ShardedTensor


def _sharded(value: torch.Tensor, dim: int, cuts: list[int]) -> sharded_tensor.ShardedTensor:
    """Parts of a tensor along a dimension, the i-th on rank i % world size."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    shards = []
    for number, (start, stop) in enumerate(itertools.pairwise([0, *cuts, value.shape[dim]])):
        if number % world_size == rank:
            part = value.narrow(dim, start, stop - start).clone()
            offsets = [start if at == dim else 0 for at in range(value.dim())]
            metadata = ShardMetadata(offsets, list(part.shape), f"rank:{rank}/cpu")
            shards.append(sharded_tensor.Shard(part, metadata))
    return sharded_tensor.init_from_local_shards(shards, list(value.shape))


@pytest.mark.parametrize("pair", PAIRS, ids="-to-".join)
@on_ranks(2)
def test_sharded_tensors(tmp_path: Path, pair: tuple[str, str]) -> None:
    saver, loader = pair
    path = str(tmp_path / "c")
    value = torch.arange(60 * 44, dtype=torch.float32).view(60, 44)
    zeros = torch.zeros_like(value)
    save_by(saver, path, {"a": _sharded(value, 0, [7, 30, 31]), "b": {"c": _sharded(value, 1, [1])}})
    targets = [(_sharded(zeros, 0, [50]), _sharded(zeros, 0, [3, 7, 9])), (_sharded(zeros, 1, [5, 22]), zeros.clone())]
    for a, c in targets:
        state = {"a": a, "b": {"c": c}}
        load_by(loader, path, state)
        for tensor in (a, c):
            if isinstance(tensor, sharded_tensor.ShardedTensor):
                for shard in tensor.local_shards():
                    expected = value
                    for dim, (start, size) in enumerate(
                        zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)
                    ):
                        expected = expected.narrow(dim, start, size)
                    assert_same(shard.tensor, expected)
            else:
                assert_same(tensor, value)
    mesh = init_device_mesh("cpu", (2,))
    target = {"a": distribute_tensor(zeros, mesh, [Shard(1)], src_data_rank=None)}
    load_by(loader, path, target)
    assert_same(target["a"].to_local(), value.tensor_split(2, 1)[dist.get_rank()])
