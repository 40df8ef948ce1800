"""Asynchronous saves that are cancelled: all ranks or none, no files are left, and the next save is as any other.

Up to the end of its commit the new checkpoint is there if and only if no `cancel` returned True, else the old one is.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import faults, steps, stores
from harness.children import wait_for
from harness.ranks import on_ranks, run_ranks
from harness.saves import save_as
from harness.snapshots import late_copies, no_snapshot_is_left
from harness.states import of_rank

import vescale_ckpt
from vescale_ckpt import CheckpointTimeoutError, SaveCancelledError, StorageFullError

BOUND = 60.0  # seconds after which something counts as hung


def _state(fill: float, size: int = 3 << 20) -> dict[str, torch.Tensor]:
    """Of several slots for each rank, so that writing can be held up between them."""
    return of_rank(fill, size)


@contextlib.contextmanager
def _held_at(moment: str, cancelled: Path, calls: bool = True) -> Any:
    """A save that begins within it, on all ranks, does not end by itself until it is cancelled. `calls`: whether this
    rank cancels it."""
    rank = dist.get_rank()
    if moment == "while it writes":
        with steps.endless_writes() if calls else contextlib.nullcontext():
            yield
    else:
        late = steps.behind("finish files", lambda *_: wait_for(cancelled))
        with late if rank == 0 else contextlib.nullcontext():
            yield


def _cancels(way: str, moment: str, callers: list[int], directory: Path) -> Any:
    rank, path, cancelled = dist.get_rank(), directory / "c", directory / "cancelled"
    save_as(way, path, _state(1), async_checkpoint=True).result(BOUND)
    dist.barrier()
    before = sorted(os.listdir(path))
    dist.barrier()
    with _held_at(moment, cancelled, rank in callers):
        handle = save_as(way, path, _state(2), async_checkpoint=True)
        dist.barrier()
        if rank in callers:
            if moment == "when others have written":
                _wait_for_gather(handle)
            said = handle.cancel()
            cancelled.touch()
        else:
            said = None
        error = handle.exception(BOUND)
    assert error is not None and handle.cancel() is False  # it is over
    with pytest.raises(SaveCancelledError):
        handle.result()
    dist.barrier()
    after = sorted(os.listdir(path))
    kept = {key: float(value[0]) for key, value in vescale_ckpt.load(path).items()}
    dist.barrier()
    save_as(way, path, _state(3), async_checkpoint=True).result(BOUND)  # the cancel before does not reach it
    dist.barrier()
    new = {float(value[0]) for value in vescale_ckpt.load(path).values()}
    assert no_snapshot_is_left()
    return said, type(error).__name__, str(error), getattr(error, "cancelled_by", None), before == after, kept, new


def _wait_for_gather(handle: vescale_ckpt.SaveHandle) -> None:
    while handle.progress()[0] < handle.progress()[1]:
        time.sleep(0.01)
    time.sleep(0.2)  # it goes on to the gather: another rank is held


@pytest.mark.parametrize("callers", [[0], [1], [0, 1, 2]])
@pytest.mark.parametrize("way", ["dcp", "nodes", "safetensors"])
def test_one_rank_that_cancels_is_enough(way: str, callers: list[int], tmp_path: Path) -> None:
    _check(run_ranks(3, _cancels, way, "while it writes", callers, tmp_path), callers)


def _check(answers: list[Any], callers: list[int]) -> None:
    by = {answer[3] for answer in answers}
    assert len(by) == 1 and by <= set(callers)
    for rank, (said, kind, text, who, nothing_left, kept, new) in enumerate(answers):
        assert said is (True if rank in callers else None) and kind == "SaveCancelledError"
        assert text.endswith(f"rank {who} has cancelled it: nothing is committed")
        assert nothing_left and set(kept.values()) == {1.0} and new == {3.0}


def test_a_rank_that_has_written_cancels_for_one_that_has_not(tmp_path: Path) -> None:
    _check(run_ranks(3, _cancels, "dcp", "when others have written", [2], tmp_path), [2])


@pytest.mark.parametrize("canceller", [0, 1])
@on_ranks(2)
def test_a_cancelled_save_that_is_synchronous_on_another_rank(canceller: int, tmp_path: Path) -> None:
    """The save is asynchronous on the rank that cancels it, and synchronous on the other, which writes longer."""
    path, cancelled = tmp_path / "c", tmp_path / "cancelled"
    vescale_ckpt.save(path, _state(1))
    said = None
    try:
        if dist.get_rank() == canceller:
            handle = vescale_ckpt.save(path, _state(2), async_checkpoint=True)
            _wait_for_gather(handle)
            said = handle.cancel()
            cancelled.touch()
            handle.result(BOUND)
        else:
            with steps.behind("finish files", lambda *_: wait_for(cancelled)):
                vescale_ckpt.save(path, _state(2))
    except SaveCancelledError as error:
        by = error.cancelled_by
    dist.barrier()
    before = float(vescale_ckpt.load(path)["w"][0])
    dist.barrier()
    vescale_ckpt.save(path, _state(3))
    after = float(vescale_ckpt.load(path)["w"][0])
    assert (said, by, before, after) == (dist.get_rank() == canceller or None, canceller, 1.0, 3.0)


@on_ranks(2)
def test_a_save_is_cancelled_before_its_copy_is_complete(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(3 << 20))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    state = {"w": weight}
    with late_copies() as begin:
        handle = vescale_ckpt.save(tmp_path / "c", state, async_checkpoint=True, gate=optimizer)
        assert not handle.staged.done()
        said = handle.cancel() if dist.get_rank() == 1 else None
        if said:
            (tmp_path / "cancelled").touch()
        wait_for(tmp_path / "cancelled")
        begin.set()
        error = handle.exception(BOUND)
        weight.grad = torch.ones(3 << 20)
        optimizer.step()  # does not wait for ever, and raises nothing
    dist.barrier()
    left = os.listdir(tmp_path / "c")
    dist.barrier()
    vescale_ckpt.save(tmp_path / "c", state, async_checkpoint=True, gate=optimizer).result(BOUND)
    assert (said, type(error).__name__, left, float(vescale_ckpt.load(tmp_path / "c")["w"][0])) == (
        (None, "SaveCancelledError", [], 0.0),
        (True, "SaveCancelledError", [], 0.0),
    )[dist.get_rank()]


@on_ranks(2)
def test_a_save_that_has_failed_is_not_cancelled(tmp_path: Path) -> None:
    """Rank 1 has failed when rank 0 cancels."""
    rank = dist.get_rank()
    if rank == 1:
        faults.inject("write", errno.ENOSPC, 0, 10**6)

    def hold(*_: Any) -> None:
        (tmp_path / "failed").touch()
        wait_for(tmp_path / "cancelled")

    has_failed = steps.behind("ask the store for the first word", hold)
    with has_failed if rank == 1 else contextlib.nullcontext():
        handle = vescale_ckpt.save(tmp_path / "c", _state(1), async_checkpoint=True)
        said = None
        if rank == 0:
            wait_for(tmp_path / "failed")
            said = handle.cancel()
            (tmp_path / "cancelled").touch()
        with pytest.raises(StorageFullError):
            handle.result(BOUND)
    faults.clear()
    assert said == (False, None)[dist.get_rank()]


@on_ranks(2)
def test_a_save_goes_on_if_the_others_cannot_be_told(tmp_path: Path) -> None:
    with _held_at("when others have written", tmp_path / "go on"):
        handle = vescale_ckpt.save(tmp_path / "c", _state(1), async_checkpoint=True)
        with steps.failing("ask the store for the first word", steps.StoreGoneError()):
            with pytest.raises(CheckpointTimeoutError):
                handle.cancel()
            dist.barrier()
        (tmp_path / "go on").touch()
        assert (handle.result(BOUND).bytes > 0, float(vescale_ckpt.load(tmp_path / "c")["w"][0])) == (True, 1.0)


def test_a_save_to_an_object_store_is_cancelled(url: str) -> None:
    pytest.importorskip("obstore", reason="object stores need obstore")
    vescale_ckpt.save(f"{url}/c", _state(1, 1000))
    before = stores.names(f"{url}/c")
    with steps.endless_writes():
        handle = vescale_ckpt.save(f"{url}/c", _state(2, 16 << 20), async_checkpoint=True)
        assert handle.cancel()
        with pytest.raises(SaveCancelledError, match="nothing is committed"):
            handle.result(BOUND)
    assert stores.names(f"{url}/c") == before
    vescale_ckpt.save(f"{url}/c", _state(3, 1000))
    assert float(vescale_ckpt.load(f"{url}/c")["w"][0]) == 3.0


def test_a_handle_can_be_cancelled_from_any_thread(checkpoint: Path) -> None:
    answers: list[bool] = []
    with steps.endless_writes():
        handle = vescale_ckpt.save(checkpoint, _state(1), async_checkpoint=True)
        threads = [threading.Thread(target=lambda: answers.append(handle.cancel())) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(BOUND)
        assert isinstance(handle.exception(BOUND), SaveCancelledError)
    assert answers and answers[0] and os.listdir(checkpoint) == []


# --- Between the gather of the writes and the end of the commit


#: The step that commits, by layout.
LAYOUTS = {"dcp": "commit", "nodes": "commit on a machine", "safetensors": "commit an export"}
POINTS = ("before the decision", "before the store is asked", "before the commit", "after the commit")


def _values(step: int) -> dict[str, torch.Tensor]:
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {f"of {rank}": torch.randn(5000, generator=generator), "w": torch.full((8,), float(step))}


def _begin(layout: str, path: Path, step: int) -> vescale_ckpt.SaveHandle:
    return save_as(layout, path, _values(step), async_checkpoint=True)


def _act_at(point: str, layout: str, action: Any) -> Any:
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
    for key, value in _values(step).items():
        assert torch.equal(found[key], value), key
    return step


def _cancelled_at(layout: str, point: str, callers: tuple[int, ...], folder: Path) -> None:
    rank, path = dist.get_rank(), folder / "checkpoint"
    there, called = folder / "there", [folder / f"called {caller}" for caller in callers]
    _begin(layout, path, 1).result(BOUND)
    dist.barrier()
    before = sorted(os.listdir(path))
    dist.barrier()

    def hold(*_: Any, **__: Any) -> None:
        there.touch()
        for file in called:
            wait_for(file)

    with _act_at(point, layout, hold) if rank == 0 else steps.before("may commit", lambda *_: None):
        handle = _begin(layout, path, 2)
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
    _begin(layout, path, 3).result(BOUND)
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
    _begin(layout, path, 1).result(BOUND)
    dist.barrier()

    def die(*_: Any, **__: Any) -> None:
        (folder / "there").touch()
        wait_for(folder / "called")
        os.kill(os.getpid(), signal.SIGKILL)

    with _act_at(point, layout, die) if rank == 0 else steps.before("may commit", lambda *_: None):
        handle = _begin(layout, path, 2)
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
