"""What a rank does before the first byte of a save is written."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import vescale_ckpt
from benchmarks.planning.simulated_rank import alone, simulated_rank, state_of
from benchmarks.timing import STOCK, Sample, Steps, Stopwatch, alternate, first_call
from vescale_ckpt import _C
from vescale_ckpt.simulate.models import MODELS, with_adam
from vescale_ckpt.simulate.parallelism import Parallelism

_SHAPES = ((256,), (16, 16), (4, 64), (2, 8, 16))  # 1 KiB each

State = dict[str, Any]


def plain_tensors(count: int) -> dict[str, torch.Tensor]:
    return {f"layers.{number}.weight": torch.zeros(_SHAPES[number % len(_SHAPES)]) for number in range(count)}


def dtensors(count: int) -> dict[str, DTensor]:
    """On a mesh of all ranks, of which each holds 1 KiB of every tensor."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    placements = (Shard(0),)
    return {
        name: DTensor.from_local(tensor, mesh, placements, run_check=False)
        for name, tensor in plain_tensors(count).items()
    }


_STATES: dict[str, Callable[[int], Any]] = {"plain tensors": plain_tensors, "DTensors": dtensors}


def before_first_byte(kind: str, count: int, rounds: int, directory: Path, seed: int) -> list[Sample]:
    """A save of one rank: cold, with nothing cached, and warm. In a process without a process group."""
    with alone():
        state = {"model": _STATES[kind](count)}
        candidates = {
            "dcp.save, our planner and writer": lambda: _ours_in_dcp(state, directory / "dcp"),
            "vescale_ckpt.save": lambda: _ours(state, directory / "ours"),
            STOCK: lambda: _stock(state, directory / "stock"),
        }
        case = f"before the first byte, {count:,} {kind} on one rank"
        return alternate(case, candidates, dict.fromkeys(candidates, rounds), seed)


def _ours_in_dcp(state: State, path: Path) -> Steps:
    planner = vescale_ckpt.SavePlanner()
    return _cold_and_warm(
        lambda: dcp_save(state, storage_writer=vescale_ckpt.StorageWriter(path), planner=planner),
        path,
        (_C.FileWriter, "write_tensors"),
    )


def _ours(state: State, path: Path) -> Steps:
    planner = vescale_ckpt.SavePlanner()
    return _cold_and_warm(
        lambda: vescale_ckpt.save(path, state, planner=planner), path, (_C.FileWriter, "write_tensors")
    )


def _stock(state: State, path: Path) -> Steps:
    planner = stock_planner()
    return _cold_and_warm(
        lambda: dcp_save(state, storage_writer=filesystem.FileSystemWriter(path, sync_files=False), planner=planner),
        path,
        (filesystem, "_write_item"),
    )


def stock_planner() -> SavePlanner:
    """With cached plans of its own: stock keeps them by the name of the planner's class."""
    planner: SavePlanner = type(f"SavePlanner{perf_counter()}", (DefaultSavePlanner,), {})(enable_plan_caching=True)
    return planner


def _cold_and_warm(save: Callable[[], object], path: Path, first_write: tuple[Any, str]) -> Steps:
    steps: Steps = {}
    for step in ("cold", "second", "warm"):  # the second save may still be making what later ones find
        shutil.rmtree(path, ignore_errors=True)
        with first_call(*first_write) as written:
            start = perf_counter()
            save()
        steps[step] = written.since(start)
    del steps["second"]
    return steps


def local_plans(kind: str, count: int, rounds: int, seed: int) -> list[Sample]:
    """The local plan alone. In a process without a process group."""
    with alone():
        case = f"local plan, {count:,} {kind}"
        return _local_plans(case, _STATES[kind](count), rounds, rounds, seed)


def local_plans_of_model(
    model: str, parallelism: Parallelism, rounds: int, stock_rounds: int, seed: int
) -> list[Sample]:
    """The local plan of one rank of a big job, with Adam's state. In a process without a process group."""
    entries = with_adam(MODELS[model].entries(torch.bfloat16))
    with simulated_rank(parallelism.ranks, parallelism.ranks // 2):
        state = state_of(entries, parallelism)
        mesh = f"FSDP {parallelism.fsdp:,} x TP {parallelism.tensor}"
        case = f"local plan, {model} + Adam, {mesh}, {len(state):,} items"
        return _local_plans(case, state, rounds, stock_rounds, seed)


def _local_plans(case: str, state: State, rounds: int, stock_rounds: int, seed: int) -> list[Sample]:
    candidates: dict[str, Callable[[], Steps]] = {"vescale": lambda: _plan_twice(vescale_ckpt.SavePlanner(), state)}
    if stock_rounds:
        candidates[STOCK] = lambda: _plan_twice(stock_planner(), state)
    counts = {name: rounds if name == "vescale" else stock_rounds for name in candidates}
    return alternate(case, candidates, counts, seed)


def _plan_twice(planner: SavePlanner, state: State) -> Steps:
    watch = Stopwatch()
    for step in ("cold", "warm"):
        planner.set_up_planner(state, None, False)
        planner.create_local_plan()
        watch.lap(step)
    return watch.seconds
