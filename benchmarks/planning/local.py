"""Saves and loads of many small tensors: one rank until its first byte is written, and a few ranks that talk a lot."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
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
from benchmarks.candidates import plug_points
from benchmarks.command import Alternate
from benchmarks.harness.by_turns import STOCK, Sample, Steps, Turn
from benchmarks.harness.room import WrongContentsError
from benchmarks.harness.saves_and_loads import ours, stock, stock_save_planner
from benchmarks.ranks import Rank, Ranks, Timed, alone, ranks_on, timed, together
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

        def by_save(planner: Planner) -> None:
            with mock.patch.object(api, "_planners", PerGroup(lambda: planner)):
                vescale_ckpt.save(path, state)

        def by_stock(planner: SavePlanner) -> None:
            dcp_save(state, storage_writer=filesystem.FileSystemWriter(path, sync_files=False), planner=planner)

        candidates: dict[str, Turn] = {
            "dcp.save, ours": lambda: _steps(ours_in_dcp, vescale_ckpt.SavePlanner(), path, our_write),
            "vescale_ckpt.save": lambda: _steps(by_save, Planner(), path, our_write),
            STOCK: lambda: _steps(by_stock, stock_save_planner(), path, stock_write),
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


# --- Steady saves and loads of a few ranks


CANDIDATES = {"dcp.save / dcp.load, ours": plug_points, "vescale_ckpt": ours, STOCK: partial(stock, 1)}


def steady(alternate: Alternate, size: int, tensors: int, directory: Path) -> Iterator[Sample]:
    """Seconds of the slowest rank. Two more rounds come before the counted ones, and fill the caches."""
    case = f"steady, {tensors:,} DTensors of 1 KiB a rank on {size} ranks"
    with ranks_on(size) as ranks:
        ranks.call(_hold, tensors)
        turns = {name: partial(_turn, ranks, name, directory / "checkpoint") for name in CANDIDATES}
        yield from alternate(case, turns, warmup=2)


def _turn(ranks: Ranks, name: str, path: Path) -> Steps:
    steps = {step: together(ranks.call(_timed, name, step, path)) for step in ("save", "load")}
    shutil.rmtree(path)
    return steps


def _hold(rank: Rank, tensors: int) -> None:
    """A state, and all candidates with what they keep from save to save."""
    candidates = {name: make() for name, make in CANDIDATES.items()}
    rank.kept.update(state=dtensors(tensors), candidates=candidates, value=10.0 * rank.rank)


def _timed(rank: Rank, name: str, step: str, path: Path) -> Timed:
    state, loads = rank.kept["state"], step == "load"
    rank.kept["value"] += not loads
    value = rank.kept["value"]
    for tensor in state.values():
        tensor.to_local().fill_(-1.0 if loads else value)
    taken = timed(rank.barrier.wait, lambda: getattr(rank.kept["candidates"][name], step)(state, path))
    if wrong := [key for key, tensor in state.items() if not torch.all(tensor.to_local() == value)]:
        raise WrongContentsError(f"{len(wrong)} tensors came back with other values: {wrong[:3]}")
    return taken
