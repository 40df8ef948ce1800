"""Saves and loads of many small tensors on a few ranks, where what ranks tell each other takes most of the time."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import vescale_ckpt
from benchmarks.command import Alternate
from benchmarks.harness.by_turns import STOCK, Sample, Steps
from benchmarks.harness.saves_and_loads import WrongContentsError, stock_save_planner
from benchmarks.planning.local import State, dtensors
from benchmarks.ranks import ONE_NODE, Rank, Ranks, Timed, ranks_on, timed, together

Candidate = tuple[Callable[[State, Path], object], Callable[[State, Path], object] | None]  # a save, a load

NAMES = ("dcp.save / dcp.load, ours", "vescale_ckpt.save", STOCK)


def run(alternate: Alternate, size: int, tensors: int, directory: Path) -> Iterator[Sample]:
    """Seconds of the slowest rank. Two more rounds come before the counted ones, and fill the caches."""
    case = f"steady, {tensors:,} DTensors of 1 KiB a rank on {size} ranks"
    with ranks_on(size, ONE_NODE) as ranks:
        ranks.call(_hold, tensors)
        turns = {name: partial(_turn, ranks, name, directory / "checkpoint") for name in NAMES}
        yield from alternate(case, turns, warmup=2)


def _turn(ranks: Ranks, name: str, path: Path) -> Steps:
    steps = {"save": together(ranks.call(_save, name, path))}
    loads: list[Timed | None] = ranks.call(_load, name, path)
    shutil.rmtree(path)
    timed_loads = [part for part in loads if part is not None]
    return {**steps, "load": together(timed_loads)} if timed_loads else steps


# --- What ranks do


def _hold(rank: Rank, tensors: int) -> None:
    """A state, and all candidates with planners that they keep."""
    our_planner, cached = vescale_ckpt.SavePlanner(), stock_save_planner()
    our_load_planner = vescale_ckpt.LoadPlanner()
    candidates: tuple[Candidate, ...] = (
        (
            lambda state, path: dcp_save(state, storage_writer=vescale_ckpt.StorageWriter(path), planner=our_planner),
            lambda state, path: dcp_load(
                state, storage_reader=vescale_ckpt.StorageReader(path), planner=our_load_planner
            ),
        ),
        (lambda state, path: vescale_ckpt.save(path, state), None),
        (
            lambda state, path: dcp_save(
                state, storage_writer=FileSystemWriter(path, sync_files=False), planner=cached
            ),
            lambda state, path: dcp_load(state, storage_reader=FileSystemReader(path)),
        ),
    )
    rank.kept.update(
        model=dtensors(tensors), candidates=dict(zip(NAMES, candidates, strict=True)), value=10.0 * rank.rank
    )


def _save(rank: Rank, name: str, path: Path) -> Timed:
    rank.kept["value"] += 1
    _fill(rank, rank.kept["value"])
    return timed(rank, lambda: rank.kept["candidates"][name][0]({"model": rank.kept["model"]}, path))


def _load(rank: Rank, name: str, path: Path) -> Timed | None:
    load = rank.kept["candidates"][name][1]
    if load is None:
        return None
    _fill(rank, -1.0)
    taken = timed(rank, lambda: load({"model": rank.kept["model"]}, path))
    value = rank.kept["value"]
    wrong = [key for key, tensor in rank.kept["model"].items() if not torch.all(tensor.to_local() == value)]
    if wrong:
        raise WrongContentsError(f"{len(wrong)} tensors came back with other values: {wrong[:3]}")
    return taken


def _fill(rank: Rank, value: float) -> None:
    for tensor in rank.kept["model"].values():
        tensor.to_local().fill_(value)
