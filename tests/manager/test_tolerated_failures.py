"""`CheckpointManager(on_error="warn")`: saves that fail end no training, on any rank; the next one is made."""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import faults, steps
from harness.children import wait_for
from harness.logs import logged
from harness.ranks import on_ranks
from test_manager import BOUND

import vescale_ckpt
from vescale_ckpt import CheckpointError, CheckpointManager, Schedule, StorageFullError, metrics


@contextlib.contextmanager
def _failures() -> Iterator[list[int | None]]:
    """The steps whose saves listeners have seen fail."""
    failed: list[int | None] = []

    def note(finished: metrics.Finished) -> None:
        if metrics.figures(finished)[f"checkpoint/{finished.kind}/failed"]:
            failed.append(finished.step)

    remove = metrics.on_finish(note)
    try:
        yield failed
    finally:
        remove()


def _state(step: int) -> dict[str, Any]:
    return {f"of {dist.get_rank() if dist.is_initialized() else 0}": torch.full((1000,), float(step)), "step": step}


@pytest.mark.parametrize(
    ("is_async", "call", "who"), [(False, "write", 1), (True, "write", 0), (False, "rename", 0), (True, "rename", 0)]
)
@on_ranks(2)
def test_a_full_disk_on_one_rank(checkpoint: Path, is_async: bool, call: str, who: int) -> None:
    rank = dist.get_rank()
    with (
        logged(logging.ERROR) as texts,
        _failures() as told,
        CheckpointManager(checkpoint, async_checkpoint=is_async, save_interval_steps=2, on_error="warn") as saver,
    ):
        saver.save(2, _state(2))
        saver.wait()
        if rank == who:
            faults.inject(call, errno.ENOSPC, 0, 10**6)
        handle = saver.save(4, _state(4))
        if handle is not None:
            with pytest.raises(StorageFullError):
                handle.result(BOUND)
        faults.clear()
        dist.barrier()
        assert saver.save(5, _state(5)) is None  # it is not due
        saver.wait()
        failed = saver.failed_saves
        saver.save(6, _state(6))
    dist.barrier()
    values = {**_state(0)}
    assert CheckpointManager(checkpoint).restore(values) == 6 and values["step"] == 6
    assert any("No space" in text for text in texts)
    answer = handle is None, failed, saver.failed_saves, saver.steps(), told
    assert answer == (not is_async, 1, 1, [2, 6], [4])


@on_ranks(2)
def test_the_save_after_a_failure_that_nobody_saw_is_made(checkpoint: Path) -> None:
    """The next `save` notices the failure of the one before, and is made."""
    with _failures() as told, CheckpointManager(checkpoint, on_error="warn") as saver:
        if dist.get_rank() == 1:
            faults.inject("sync", errno.EIO, 0, 10**6)
        first = saver.save(1, _state(1))
        assert first is not None and first.wait(BOUND) is not None
        faults.clear()
        second = saver.save(2, _state(2))
        assert second is not None and second.result(BOUND).bytes > 0
        dist.barrier()
        assert (saver.failed_saves, saver.steps(), told) == (1, [2], [1])


@on_ranks(2)
def test_the_failure_of_another_save_of_the_group_is_only_logged(checkpoint: Path) -> None:
    with CheckpointManager(checkpoint, on_error="warn") as saver:
        with faults.fault("sync", errno.EIO, times=10**6):
            vescale_ckpt.save(checkpoint / "alone", _state(1), async_checkpoint=True).wait(BOUND)
        saver.save(1, _state(1))
        saver.wait()
        dist.barrier()
        assert (saver.failed_saves, saver.steps()) == (0, [1])


@pytest.mark.parametrize("where", ["saving if it is due", "beginning to save"])
@on_ranks(2)
def test_a_rank_that_comes_too_late(checkpoint: Path, where: str) -> None:
    """Rank 1 comes after rank 0 has given up."""
    rank = dist.get_rank()
    gave_up = checkpoint.parent / "gave up"
    schedule = Schedule(seconds=0 if where == "saving if it is due" else None)
    with _failures() as told, CheckpointManager(checkpoint, timeout=3, on_error="warn", schedule=schedule) as saver:
        saver.save(1, _state(1))
        saver.wait()
        dist.barrier()
        if rank == 1:
            wait_for(gave_up)
        handle = saver.save(2, _state(2))
        gave_up.touch()
        dist.barrier()
        second = saver.save(3, _state(3))
        assert second is not None
        second.result(BOUND)
        dist.barrier()
        assert (handle, saver.failed_saves, told, saver.steps()) == (None, 1, [2], [1, 3])


@on_ranks(2)
def test_all_ranks_go_on_without_a_save_if_the_one_before_is_not_done_on_one(checkpoint: Path) -> None:
    """The save before does not end in time on rank 1, and has ended on rank 0."""
    rank, go_on = dist.get_rank(), checkpoint.parent / "go on"
    with _failures() as told, CheckpointManager(checkpoint, timeout=3, on_error="warn") as saver:
        hold = steps.behind("write and commit", lambda *_: wait_for(go_on))
        late = hold if rank == 1 else contextlib.nullcontext()
        with late:
            saver.save(1, _state(1))
            second = saver.save(2, _state(2))
            dist.barrier()
            go_on.touch()
            saver.wait()
        third = saver.save(3, _state(3))
        assert third is not None
        third.result(BOUND)
        dist.barrier()
        assert (second, saver.failed_saves, told, saver.steps()) == (None, 1, [2], [1, 3])


@on_ranks(2)
def test_mistakes_of_the_caller_are_raised(checkpoint: Path) -> None:
    rank = dist.get_rank()
    with CheckpointManager(checkpoint, best="loss", best_mode="min", on_error="warn") as saver:
        with pytest.raises(ValueError, match="loss"):
            saver.save(1, _state(1))
        with pytest.raises(CheckpointError, match="steps 0 to 1"):
            saver.save(rank, _state(1), metrics={"loss": 1})
        with pytest.raises(CheckpointError, match="differ over ranks"):
            saver.save(1, _state(1), metrics={"loss": rank})
        with pytest.raises(TypeError):
            saver.save(1, "no state", metrics={"loss": 1})  # type: ignore[arg-type]
        assert saver.failed_saves == 0
        saver.save(1, _state(1), metrics={"loss": 1})
    asks_if_due = CheckpointManager(checkpoint, schedule=Schedule(seconds=0))
    with asks_if_due, pytest.raises(CheckpointError, match="steps 0 to 1"):
        asks_if_due.save(rank, _state(1))
    with pytest.raises(ValueError, match="on_error"):
        CheckpointManager(checkpoint, on_error="ignore")  # type: ignore[arg-type]
