"""`Schedule(deadline_seconds=)`: what is durable at the deadline of a signal, and what is cancelled."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import faults, steps
from harness.children import wait_for
from harness.ranks import close_ranks, on_ranks, run_ranks
from harness.snapshots import held
from test_manager import BOUND
from test_manager_async import let_go_by

from vescale_ckpt import CheckpointError, CheckpointManager, CheckpointTimeoutError, Schedule
from vescale_ckpt.manager import schedule
from vescale_ckpt.manager.running_save import RunningSave

LONG, SHORT = 1000.0, 1.0  # seconds until the deadline: it is not reached; a save that is held is not durable then
LOAD_OF_THE_MACHINE = 20.0  # seconds that tests allow on top: to tell what ends from what hangs


def _state(step: int, size: int = 1000) -> dict[str, Any]:
    return {f"of {dist.get_rank() if dist.is_initialized() else 0}": torch.full((size,), float(step)), "step": step}


def _manager(directory: Path, seconds: float, **options: Any) -> CheckpointManager:
    schedule = Schedule(signal=signal.SIGTERM, deadline_seconds=seconds)
    return CheckpointManager(directory, schedule=schedule, **options)


def _signal(rank: int = 1) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGTERM)


def _answer(saver: CheckpointManager) -> Any:
    saver.close()
    dist.barrier()
    found = {"step": 0}
    step = CheckpointManager(saver.directory).restore(found, prepare=False) if saver.steps() else 0
    folders = sorted(os.listdir(saver.directory))
    dist.barrier()
    return saver.preempted, saver.steps(), folders == [f"step-{step}" for step in saver.steps()], step == found["step"]


@pytest.mark.parametrize("is_async", [True, False])
@on_ranks(2)
def test_the_running_save_and_the_last_one_are_made_if_there_is_time(checkpoint: Path, is_async: bool) -> None:
    saver = _manager(checkpoint, LONG, async_checkpoint=is_async)
    with held() if is_async else contextlib.nullcontext() as event:
        saver.save(1, _state(1))
        _signal()
        if is_async:
            threading.Timer(0.7, event.set).start()
        handle = saver.save(2, _state(2))
    assert handle is not None and handle.done() and saver.save(3, _state(3)) is not None
    saver.wait()
    assert _answer(saver) == (True, [1, 2, 3], True, True)


@on_ranks(2)
def test_the_running_save_is_cancelled_at_the_deadline(checkpoint: Path) -> None:
    saver = _manager(checkpoint, SHORT)
    saver.save(1, _state(1))
    saver.wait()
    with steps.endless_writes():
        running = saver.save(2, _state(2, 3 << 20))
        assert running is not None
        _signal()
        began = time.monotonic()
        assert saver.save(3, _state(3)) is None
        assert time.monotonic() - began < SHORT + 0.5 + 5 + LOAD_OF_THE_MACHINE
        assert type(running.exception(BOUND)).__name__ == "SaveCancelledError"
        preempted = saver.preempted
    saver.save(4, _state(4))  # the process was not killed
    assert (preempted, *_answer(saver)) == (False, False, [1, 4], True, True)


@on_ranks(2)
def test_the_last_save_is_cancelled_at_the_deadline(checkpoint: Path) -> None:
    saver = _manager(checkpoint, SHORT)
    saver.save(1, _state(1))
    saver.wait()
    with held() as event, let_go_by(RunningSave, "cancel", event):
        if dist.get_rank() == 1:  # it waits for the other
            event.set()
        _signal()
        handle = saver.save(2, _state(2))
        assert handle is not None and type(handle.exception(BOUND)).__name__ == "SaveCancelledError"
    assert _answer(saver) == (False, [1], True, True)


@on_ranks(2)
def test_the_last_save_has_all_the_disk(checkpoint: Path) -> None:
    saver = _manager(checkpoint, LONG)
    with steps.endless_writes():
        _signal(0)
        saver.save(1, _state(1, 3 << 20))
    assert _answer(saver) == (True, [1], True, True)


@on_ranks(2)
def test_the_last_save_is_left_out_if_earlier_ones_took_longer_than_what_is_left(checkpoint: Path) -> None:
    saver = _manager(checkpoint, LONG)
    saver.save(1, _state(1))
    saver.wait()
    if dist.get_rank() == 0:
        saver._saves._durations.append(2 * LONG)  # what it has measured
    with held() as event:
        saver.save(2, _state(2))
        _signal()
        threading.Timer(0.5, event.set).start()
        assert saver.save(3, _state(3)) is None
    assert saver.save(4, _state(4)) is not None  # it is preempted, and saves as it is told
    assert _answer(saver) == (True, [1, 2, 4], True, True)


@on_ranks(2)
def test_a_commit_that_has_begun_is_finished(checkpoint: Path) -> None:
    """The deadline comes when the commit of the running save has begun: it is finished."""
    saver, begun, go_on = _manager(checkpoint, SHORT), threading.Event(), threading.Event()

    def hold(*_: Any) -> None:
        begun.set()
        assert go_on.wait(BOUND)

    late = steps.before("commit", hold) if dist.get_rank() == 0 else contextlib.nullcontext()
    with late, let_go_by(RunningSave, "cancel", go_on):
        saver.save(1, _state(1))
        assert dist.get_rank() == 1 or begun.wait(BOUND)
        dist.barrier()
        _signal()
        assert saver.save(2, _state(2)) is None
    assert _answer(saver) == (True, [1], True, True)


@on_ranks(2)
def test_a_signal_that_comes_while_save_waits(checkpoint: Path) -> None:
    """`save` was called before the signal came, and waits for the save before."""
    saver = _manager(checkpoint, SHORT)
    with held() as event, let_go_by(RunningSave, "cancel", event):
        saver.save(1, _state(1))
        threading.Timer(1, _signal).start()
        assert saver.save(2, _state(2)) is None
    assert _answer(saver) == (False, [], True, True)


@pytest.mark.parametrize(("on_error", "expected"), [("raise", ("StorageFullError", 0)), ("warn", ("", 1))])
@on_ranks(2)
def test_the_last_save_is_tried_again_if_it_fails(checkpoint: Path, on_error: str, expected: Any) -> None:
    """The last save fails: it is tried again, as long as there is time."""
    rank = dist.get_rank()
    saver = _manager(checkpoint, LONG, on_error=on_error)
    if rank == 1:
        faults.inject("write", errno.ENOSPC, 0, 10**6)
    _signal()
    told = ""
    try:
        saver.save(1, _state(1))
    except CheckpointError as error:
        told = type(error).__name__
    faults.clear()
    assert not saver.preempted
    dist.barrier()
    saver.save(2, _state(2))
    assert (told, saver.failed_saves, *_answer(saver)) == (*expected, True, [2], True, True)


def _dies(directory: Path) -> Any:
    saver = _manager(directory, LONG)
    saver.save(1, _state(1))
    saver.wait()
    _signal(0)
    last_act = steps.before("write what was staged", lambda _: os.kill(os.getpid(), signal.SIGKILL))
    with last_act if dist.get_rank() == 1 else contextlib.nullcontext(), pytest.raises(CheckpointTimeoutError) as told:
        saver.save(2, _state(2))
    return saver.preempted, saver.steps(), told.value.late_ranks


def test_a_rank_that_dies_in_the_last_save(checkpoint: Path) -> None:
    assert run_ranks(2, _dies, checkpoint, check=False)[0] == (False, [1], [1])


def _does_not_come(directory: Path) -> Any:
    saver = _manager(directory, SHORT)
    with mock.patch.object(schedule, "SECONDS_TO_CANCEL", 0.5):
        _signal(0)
        if dist.get_rank() == 0:
            began = time.monotonic()
            with pytest.raises(CheckpointTimeoutError) as told:
                saver.save(1, _state(1))
            assert SHORT < time.monotonic() - began < BOUND
            (directory.parent / "gave up").touch()
            return told.value.late_ranks
    wait_for(directory.parent / "gave up")
    return None


def test_a_rank_that_does_not_come_to_the_last_save(checkpoint: Path) -> None:
    assert run_ranks(2, _does_not_come, checkpoint) == [[1], None]
    close_ranks()  # they count their failures differently now


@on_ranks(2)
def test_a_rank_that_cannot_tell_the_others_is_told_by_them(checkpoint: Path) -> None:
    """Rank 0 cannot reach the store at the deadline, and writes later."""
    saver, rank = _manager(checkpoint, SHORT), dist.get_rank()
    with held() if rank == 0 else steps.endless_writes() as event:
        running = saver.save(1, _state(1, 3 << 20))
        assert running is not None
        _signal()
        away = steps.failing("ask the store for the first word", steps.StoreGoneError())
        with away if rank == 0 else contextlib.nullcontext():
            assert saver.save(2, _state(2)) is None
            if rank == 0:
                event.set()
            error = running.exception(BOUND)
    assert (type(error).__name__, *_answer(saver)) == ("SaveCancelledError", False, [], True, True)
