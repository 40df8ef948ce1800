"""Saves and loads of many small tensors on a few ranks, where what ranks tell each other takes most of the time."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from benchmarks.candidates import plug_points
from benchmarks.command import Alternate
from benchmarks.harness.by_turns import STOCK, Sample, Steps
from benchmarks.harness.saves_and_loads import WrongContentsError, ours, stock
from benchmarks.planning.local import dtensors
from benchmarks.ranks import Rank, Ranks, Timed, ranks_on, timed, together

CANDIDATES = {"dcp.save / dcp.load, ours": plug_points, "vescale_ckpt": ours, STOCK: partial(stock, 1)}


def run(alternate: Alternate, size: int, tensors: int, directory: Path) -> Iterator[Sample]:
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


# --- What ranks do


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
