"""Ranks that save without others: each for itself with `no_dist=True`, in every way and with each part of stock's.
`use_collectives=False` is refused wherever a part of this package takes part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.ranks import on_ranks
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

import vescale_ckpt
from vescale_ckpt import CheckpointError, SavePlanner, StorageWriter

WRITERS = {"our writer": StorageWriter, "stock writer": FileSystemWriter}
PLANNERS = {"our planner": SavePlanner, "stock planner": DefaultSavePlanner}
WAYS = ("save", "async", "process")


def save(way: str, state: dict[str, Any], **options: Any) -> None:
    if way == "save":
        dcp.save(state, **options)
        return
    kind = AsyncCheckpointerType.PROCESS if way == "process" else AsyncCheckpointerType.THREAD
    answer = dcp.async_save(state, async_checkpointer_type=kind, **options)
    (answer.upload_completion if isinstance(answer, AsyncSaveResponse) else answer).result()


def state_of(rank: int, step: int = 0) -> dict[str, Any]:
    return {"all": torch.arange(5.0) + step, f"of {rank}": torch.full((rank + 2,), 10.0 * rank + step), "rank": rank}


def _alone() -> dist.ProcessGroup:
    if not _groups:
        _groups.append(dist.new_subgroups(1)[0])
    return _groups[0]


_groups: list[dist.ProcessGroup] = []


@on_ranks(2)
def test_ranks_save_each_for_itself(tmp_path: Path) -> None:
    rank = dist.get_rank()
    for way in WAYS:
        for writer_name, writer in WRITERS.items():
            for planner_name, make in PLANNERS.items():
                planner = make()
                for step in range(2):  # the second with a kept plan
                    path = tmp_path / f"{way}, {writer_name}, {planner_name}, {step}, {rank}"
                    state = state_of(rank, step)
                    save(way, state, storage_writer=writer(path), planner=planner, no_dist=True)
                    loaded = vescale_ckpt.load(path, process_group=_alone())
                    assert loaded["rank"] == rank, path
                    assert all(torch.equal(loaded[key], state[key]) for key in ("all", f"of {rank}")), path


class WithItems(SavePlanner):
    """It gets DCP's own items."""

    def create_local_plan(self) -> SavePlan:
        return super().create_local_plan()


@on_ranks(2)
def test_saves_without_collectives_are_refused_on_all_ranks_before_a_file_exists(tmp_path: Path) -> None:
    rank, state = dist.get_rank(), state_of(dist.get_rank())
    for way in WAYS:
        for writer_name, writer in WRITERS.items():
            for planner_name, make in {**PLANNERS, "our planner of items": WithItems}.items():
                path = tmp_path / f"{way}, {writer_name}, {planner_name}"
                options = {"storage_writer": writer(path), "use_collectives": False}
                if "our" not in f"{writer_name} {planner_name}":
                    save(way, state, planner=make(), **options)
                    assert vescale_ckpt.load(path)["rank"] == rank
                    continue
                planner = make()
                for attempt in range(2):
                    with pytest.raises(CheckpointError, match=r"use_collectives=False.* nothing is gathered again"):
                        save(way, state, planner=planner, **options)
                    assert not path.exists() or not [*path.iterdir()], path
                    dist.barrier()
                    if attempt == 0 and way == "save":  # plans are kept from here on
                        dcp.save(state, storage_writer=writer(tmp_path / f"kept {path.name}"), planner=planner)


def test_a_process_alone_is_told_too(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="use_collectives=False"):
        dcp.save({"a": torch.ones(2)}, storage_writer=StorageWriter(tmp_path / "c"), use_collectives=False)
    assert not (tmp_path / "c").exists()
