"""The gate of planners, writers and readers: each of ours, of stock's and of some subclasses together with each other.

5 save planners, 2 writers, 2 readers and 4 load planners are 80 combinations, and each saves twice, because the second
save may use a plan that was kept. In one process, on 2 ranks, and with DCP's process for asynchronous saves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.ranks import forked, on_ranks
from harness.states import assert_same, blank, numbers
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, WriteItem
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from vescale_ckpt import LoadPlanner, SavePlanner, StorageReader, StorageWriter

# --- Subclasses. What one of them saves or loads is twice what the state holds, so that its hook must have run.


class DoubledObjects(SavePlanner):
    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        value = super().transform_object(write_item, object)
        return value * 2 if isinstance(value, torch.Tensor) else value


class StockDoubled(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        value = super().lookup_object(index)
        return value * 2 if isinstance(value, torch.Tensor) else value


class Reordered(SavePlanner):
    """It gets DCP's own items, and returns others of its own."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self.plan = dataclasses.replace(plan, items=list(reversed(plan.items)))
        return self.plan


class DoubledTensors(LoadPlanner):
    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        tensor.mul_(2)
        super().commit_tensor(read_item, tensor)


class StockReordered(DefaultLoadPlanner):
    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        return dataclasses.replace(plan, items=list(reversed(plan.items)))


SAVE_PLANNERS = {SavePlanner: 1, DefaultSavePlanner: 1, DoubledObjects: 2, StockDoubled: 2, Reordered: 1}
LOAD_PLANNERS = {LoadPlanner: 1, DefaultLoadPlanner: 1, DoubledTensors: 2, StockReordered: 1}
WRITERS = (StorageWriter, FileSystemWriter)
READERS = (StorageReader, FileSystemReader)

# --- States


def _state(first: int, factor: int = 1) -> dict[str, Any]:
    """Tensors of several dtypes and objects; on several ranks shards and replicas, too."""
    state = {
        "weight": numbers(40, 30, first=first) * factor,
        "half": (numbers(700, first=first) * factor).bfloat16(),
        "scalar": torch.tensor(3.5 + first) * factor,
        "turned": (numbers(6, 7, first=first) * factor).t(),
        "nested": {"step": first, "words": ["a", {"b": first}]},
    }
    if not dist.is_initialized():
        return state
    mesh, rank = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_rank()
    whole = numbers(50, 8, first=first) * factor
    state["rows"] = DTensor.from_local(whole.chunk(mesh.size())[rank].clone(), mesh, [Shard(0)], run_check=False)
    state["copies"] = DTensor.from_local(whole, mesh, [Replicate()], run_check=False)
    state[f"of rank {rank}"] = numbers(11, first=rank + first) * factor
    return state


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.to_local() if isinstance(value, DTensor) else value for key, value in state.items()}


def _blank() -> dict[str, Any]:
    state = _state(0)
    for key, value in state.items():
        if isinstance(value, DTensor):
            value.to_local().zero_()
        else:
            state[key] = blank({key: value})[key]
    return state


# --- The gate


def _saved(folder: Path, way: str) -> Iterator[tuple[Path, int, int]]:
    """Saves in each combination of planner and writer: where, of which state, and how often its tensors are doubled."""
    kind = AsyncCheckpointerType.PROCESS if way == "process" else AsyncCheckpointerType.THREAD
    for planner_kind, factor in SAVE_PLANNERS.items():
        for writer in WRITERS:
            planner = planner_kind()
            for first in (1, 2):
                path = folder / f"{planner_kind.__name__} {writer.__name__} {first}"
                options: dict[str, Any] = {"storage_writer": writer(path), "planner": planner}
                if way == "save":
                    dcp.save(_state(first), **options)
                else:
                    answer = dcp.async_save(_state(first), async_checkpointer_type=kind, **options)
                    (answer.upload_completion if isinstance(answer, AsyncSaveResponse) else answer).result()
                yield path, first, factor


def _all_are_right(folder: Path, way: str) -> None:
    right = 0
    for path, first, of_save in _saved(folder, way):
        for reader in READERS:
            for planner, of_load in LOAD_PLANNERS.items():
                found = _blank()
                dcp.load(found, storage_reader=reader(path), planner=planner())
                assert_same(_plain(found), _plain(_state(first, of_save * of_load)))
                right += 1
    assert right == 2 * 80


@pytest.mark.parametrize("way", ["save", "async"])
@on_ranks(2)
def test_on_two_ranks(tmp_path: Path, way: str) -> None:
    _all_are_right(tmp_path, way)


@forked
def test_in_one_process(tmp_path: Path) -> None:
    _all_are_right(tmp_path, "save")


@forked
def test_by_process(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    _all_are_right(tmp_path, "process")
    dist.destroy_process_group()
