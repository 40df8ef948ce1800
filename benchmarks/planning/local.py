"""What a rank does before the first byte of a save is written."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest import mock

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import vescale_ckpt
from benchmarks.command import Alternate
from benchmarks.harness.by_turns import STOCK, Sample, Steps, Turn
from benchmarks.harness.saves_and_loads import stock_save_planner
from benchmarks.ranks import alone
from vescale_ckpt import api
from vescale_ckpt._engine import _C
from vescale_ckpt._plan.planner import Planner
from vescale_ckpt._ranks.groups import PerGroup

_SHAPES = ((256,), (16, 16), (4, 64), (2, 8, 16))  # 1 KiB each


def plain_tensors(count: int) -> dict[str, torch.Tensor]:
    return {f"layers.{number}.weight": torch.zeros(_SHAPES[number % len(_SHAPES)]) for number in range(count)}


def dtensors(count: int) -> dict[str, DTensor]:
    """On a mesh of all ranks, of which each holds 1 KiB of every tensor."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    plain = plain_tensors(count)
    return {name: DTensor.from_local(tensor, mesh, (Shard(0),), run_check=False) for name, tensor in plain.items()}


STATES: dict[str, Callable[[int], Any]] = {"plain tensors": plain_tensors, "DTensors": dtensors}


def before_first_byte(alternate: Alternate, kind: str, count: int, directory: Path) -> list[Sample]:
    """A save of one rank: cold, with nothing cached, and warm. In a process without a process group."""
    with alone():
        state = {"model": STATES[kind](count)}
        path = directory / "checkpoint"
        our_write, stock_write = (_C.FileWriter, "write_tensors"), (filesystem, "_write_item")

        def ours_in_dcp(planner: SavePlanner) -> None:
            dcp_save(state, storage_writer=vescale_ckpt.StorageWriter(path), planner=planner)

        def ours(planner: Planner) -> None:
            with mock.patch.object(api, "_planners", PerGroup(lambda: planner)):
                vescale_ckpt.save(path, state)

        def stock(planner: SavePlanner) -> None:
            dcp_save(state, storage_writer=filesystem.FileSystemWriter(path, sync_files=False), planner=planner)

        candidates: dict[str, Turn] = {
            "dcp.save, ours": lambda: _steps(ours_in_dcp, vescale_ckpt.SavePlanner(), path, our_write),
            "vescale_ckpt.save": lambda: _steps(ours, Planner(), path, our_write),
            STOCK: lambda: _steps(stock, stock_save_planner(), path, stock_write),
        }
        case = f"before the first byte, {count:,} {kind} on one rank"
        return list(alternate(case, candidates))


def _steps(save: Callable[[Any], None], planner: Any, path: Path, first_write: tuple[Any, str]) -> Steps:
    steps: dict[str, float] = {}
    for step in ("cold", "second", "warm"):  # the second save may still be making what later ones find
        shutil.rmtree(path, ignore_errors=True)
        with first_call(*first_write) as called:
            start = perf_counter()
            save(planner)
        steps[step] = called[0] - start
    del steps["second"]
    return steps


@contextmanager
def first_call(owner: Any, name: str) -> Iterator[list[float]]:
    """Notes when the function ``name`` of a module or class is called, as ``perf_counter`` tells it."""
    function = getattr(owner, name)
    called: list[float] = []

    def watched(*arguments: Any, **keywords: Any) -> Any:
        called.append(perf_counter())
        return function(*arguments, **keywords)

    with mock.patch.object(owner, name, watched):
        yield called
    if not called:
        raise RuntimeError(f"{name} was never called")
