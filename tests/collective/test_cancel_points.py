"""A save that is cancelled between the gather of the writes and the end of its commit: the new checkpoint is there bit
for bit if and only if no `cancel` returned True, else the old one is, and all ranks agree."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import steps
from harness.children import wait_for
from harness.ranks import run_ranks
from harness.saves import save_as

import vescale_ckpt
from vescale_ckpt import SaveCancelledError

BOUND = 60.0
#: The step that commits, by layout.
LAYOUTS = {"dcp": "commit", "nodes": "commit on a machine", "safetensors": "commit an export"}
POINTS = ("before the decision", "before the store is asked", "before the commit", "after the commit")


def _state(step: int) -> dict[str, torch.Tensor]:
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {f"of {rank}": torch.randn(5000, generator=generator), "w": torch.full((8,), float(step))}


def _save(layout: str, path: Path, step: int) -> vescale_ckpt.SaveHandle:
    return save_as(layout, path, _state(step), async_checkpoint=True)


def _at(point: str, layout: str, action: Any) -> Any:
    if point == "before the decision":
        return steps.before("decide to commit", action)
    if point == "before the store is asked":
        return steps.before("may commit", action)
    place = steps.before if point == "before the commit" else steps.behind
    return place(LAYOUTS[layout], action)


def _stored_step(path: Path) -> int:
    """The step whose values are there, all of them bit for bit, for this rank's part."""
    found = vescale_ckpt.load(path, broadcast_checkpoint=False)
    step = int(found["w"][0])
    for key, value in _state(step).items():
        assert torch.equal(found[key], value), key
    return step


def _cancelled_at(layout: str, point: str, callers: tuple[int, ...], folder: Path) -> None:
    rank, path = dist.get_rank(), folder / "checkpoint"
    there, called = folder / "there", [folder / f"called {caller}" for caller in callers]
    _save(layout, path, 1).result(BOUND)
    dist.barrier()
    before = sorted(os.listdir(path))
    dist.barrier()

    def hold(*_: Any, **__: Any) -> None:
        there.touch()
        for file in called:
            wait_for(file)

    with _at(point, layout, hold) if rank == 0 else steps.before("may commit", lambda *_: None):
        handle = _save(layout, path, 2)
        answer = False
        if rank in callers:
            wait_for(there)
            answer = handle.cancel()
            (folder / f"called {rank}").touch()
        error = handle.exception(BOUND)
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, (answer, type(error)))
    cancelled = any(said for said, _ in answers)
    assert cancelled == (point == "before the decision"), answers
    assert {kind for _, kind in answers} == {SaveCancelledError if cancelled else type(None)}, answers
    assert not cancelled or sorted(os.listdir(path)) == before
    assert _stored_step(path) == (1 if cancelled else 2)
    dist.barrier()
    _save(layout, path, 3).result(BOUND)
    dist.barrier()
    assert _stored_step(path) == 3
    dist.barrier()


def _all_subsets(layout: str, folder: Path) -> int:
    ranks = range(dist.get_world_size())
    subsets = [subset for size in range(1, len(ranks) + 1) for subset in itertools.combinations(ranks, size)]
    for number, (point, callers) in enumerate(itertools.product(POINTS, subsets)):
        own = folder / str(number)
        own.mkdir(exist_ok=True)
        dist.barrier()
        _cancelled_at(layout, point, callers, own)
    return len(subsets)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_subset_of_ranks_cancels_at_every_point(layout: str, ranks: int, tmp_path: Path) -> None:
    assert run_ranks(ranks, _all_subsets, layout, tmp_path, timeout=400) == [2**ranks - 1] * ranks


def _killed_at(layout: str, point: str, folder: Path) -> None:
    """Rank 1 cancels, and rank 0 dies at the point once it has."""
    rank, path = dist.get_rank(), folder / "checkpoint"
    _save(layout, path, 1).result(BOUND)
    dist.barrier()

    def die(*_: Any, **__: Any) -> None:
        (folder / "there").touch()
        wait_for(folder / "called")
        os.kill(os.getpid(), signal.SIGKILL)

    with _at(point, layout, die) if rank == 0 else steps.before("may commit", lambda *_: None):
        handle = _save(layout, path, 2)
        if rank == 1:
            wait_for(folder / "there")
            (folder / ("True" if handle.cancel() else "False")).touch()
            (folder / "called").touch()
        handle.result(BOUND)


def _stored(path: Path) -> list[float]:
    return [*vescale_ckpt.load(path, broadcast_checkpoint=False)["w"].tolist()]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("point", POINTS)
def test_the_coordinator_dies_after_a_cancel(layout: str, point: str, tmp_path: Path) -> None:
    answers = run_ranks(2, _killed_at, layout, point, tmp_path, check=False)
    assert all(isinstance(answer, BaseException) for answer in answers), answers
    cancelled = (tmp_path / "True").exists()
    assert cancelled == (point == "before the decision")
    step = 2 if point == "after the commit" else 1
    for found in run_ranks(2, _stored, tmp_path / "checkpoint"):
        assert found == [float(step)] * 8
