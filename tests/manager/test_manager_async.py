"""`CheckpointManager` with saves that go on in the background or are cancelled, and signals: who waits for whom, who is
told what."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import faults, steps
from harness.children import in_child
from harness.ranks import on_ranks
from harness.saves import error_of
from harness.snapshots import held, snapshot_memory
from harness.states import blank, same, small_state
from test_manager import BOUND, Child, restored, save_steps, steps_in

from vescale_ckpt import (
    CheckpointError,
    CheckpointManager,
    CheckpointTimeoutError,
    SaveCancelledError,
    SaveFailedError,
    Schedule,
    StorageFullError,
)
from vescale_ckpt._plan.planner import Planner
from vescale_ckpt.manager import folders
from vescale_ckpt.manager.running_save import RunningSave


@contextlib.contextmanager
def let_go_by(owner: type, name: str, event: threading.Event) -> Iterator[None]:
    """The event is set when a method is called that has to wait for it."""
    method = getattr(owner, name)

    def called(*args: Any) -> Any:
        event.set()
        return method(*args)

    with mock.patch.object(owner, name, called):
        yield


def text_of(error: BaseException | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}"


def outcome(call: Callable[[], object]) -> str:
    """What it raised, if anything."""
    return text_of(error_of(call))


# --- What follows a save


def test_what_a_save_supersedes_goes_when_it_is_durable(checkpoint: Path) -> None:
    save_steps(checkpoint, 1)
    with CheckpointManager(checkpoint, max_to_keep=1) as saver:
        with held() as event:
            handle = saver.save(2, small_state(2), metrics={"loss": 1})
            assert handle is not None and handle.staged.done() and not handle.done()
            assert saver.steps() == [1] and saver.latest() == 1
            # Somebody else does not take step 2 for an orphan.
            in_child(functools.partial(save_steps, checkpoint, 3, max_to_keep=2, async_checkpoint=False))
            assert steps_in(checkpoint) == [1, 2, 3]
            event.set()
            saver.wait()
        assert handle.done() and saver.steps() == [2, 3]
        saver.save(4, small_state(4))
    assert steps_in(checkpoint) == [4]
    assert restored(checkpoint) == (4, True)


def test_no_save_waits_for_files_to_be_removed(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clean_up, go_on, order = folders.clean_up, threading.Event(), []

    def slow(root: str, retention: Any, step: int, *of_loads: Any) -> Any:
        if step == 1:
            assert go_on.wait(BOUND)
        order.append(step)
        return clean_up(root, retention, step, *of_loads)

    monkeypatch.setattr(folders, "clean_up", slow)
    with CheckpointManager(checkpoint, max_to_keep=1) as saver:
        for step in (1, 2, 3):
            handle = saver.save(step, small_state(step))
            assert handle is not None and handle.result(BOUND).tensors > 0
        assert order == [] and saver.steps() == [1, 2, 3]
        go_on.set()
        saver.wait()
        assert order == [1, 2, 3] and saver.steps() == [3]


def test_a_process_that_ends_removes_what_its_last_save_supersedes(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clean_up, ending = folders.clean_up, threading.Event()

    def late(*args: Any) -> None:
        if threading.current_thread() is not threading.main_thread():  # where it runs if the save was done at once
            assert ending.wait(BOUND)
        return clean_up(*args)

    save_steps(checkpoint, 1)
    monkeypatch.setattr(folders, "clean_up", late)
    saver = CheckpointManager(checkpoint, max_to_keep=1)
    handle = saver.save(2, small_state(2))
    assert handle is not None and handle.result(BOUND).tensors > 0
    with let_go_by(threading.Thread, "join", ending):
        steps.finish_before_exit()
    assert steps_in(checkpoint) == [2]


def test_a_save_is_not_waited_for_for_ever(checkpoint: Path) -> None:
    with CheckpointManager(checkpoint, timeout=0.05) as saver:
        with held():
            saver.save(1, small_state(1), metrics={"loss": 1})
            with pytest.raises(CheckpointTimeoutError, match="step-1"):
                saver.save(2, small_state(2))
            assert not (checkpoint / "step-2").exists()
        saver.wait()
        assert saver.steps() == [1] and saver.metrics(1) == {"loss": 1}


# --- Failures


def test_a_save_that_fails(checkpoint: Path) -> None:
    saver = CheckpointManager(checkpoint, max_to_keep=1)
    saver.save(1, small_state(1))
    saver.wait()
    faults.inject("write", errno.ENOSPC, 0, 10**6)
    handle = saver.save(2, small_state(2))
    assert handle is not None
    with pytest.raises(StorageFullError):
        handle.result(BOUND)
    with pytest.raises(StorageFullError):
        saver.wait()
    saver.wait()  # told once
    assert saver.latest() == 1
    saver.save(3, small_state(3))
    with pytest.raises(StorageFullError), saver:
        pass
    with pytest.raises(ZeroDivisionError), CheckpointManager(checkpoint) as other:  # which is not hidden
        other.save(4, small_state(4))
        _ = 1 / 0
    faults.clear()
    assert saver.steps() == [1]
    save_steps(checkpoint, 5)
    assert steps_in(checkpoint) == [1, 5]


@on_ranks(2)
def test_a_failure_that_one_rank_has_seen_is_told_to_all(checkpoint: Path) -> None:
    rank = dist.get_rank()
    with CheckpointManager(checkpoint) as saver:
        saver.save(1, small_state(1))
        saver.wait()
        if rank == 1:
            faults.inject("open", errno.EIO, 0, 10**6)
        handle = saver.save(2, small_state(2))
        assert handle is not None
        error = handle.exception(BOUND)
        faults.clear()
        if rank == 0:
            assert outcome(handle.result) == text_of(error) != ""
        values = blank(small_state(0))
        step = saver.restore(values)
        assert same(values, small_state(step))
        unseen = outcome(lambda: saver.save(3, small_state(3)))
        then = outcome(lambda: saver.save(4, small_state(4)))
        waited = outcome(saver.wait)
        dist.barrier()
        kept = saver.steps()
    assert step == 1  # a failed save is no reason not to restore
    assert unseen.startswith("SaveFailedError") and "step-2 before this one" in unseen
    assert then == waited == "" and kept == [1, 4]


def test_two_managers_of_one_group_hear_of_each_other(checkpoint: Path) -> None:
    one, other = CheckpointManager(checkpoint / "one"), CheckpointManager(checkpoint / "other")
    with one, held() as event, let_go_by(*steps.STEPS["wait for the save before"], event):
        one.save(1, small_state(1))
        handle = other.save(1, small_state(1))  # waits for that of `one`
        assert one.steps() == [1] and handle is not None
    other.wait()
    one = CheckpointManager(checkpoint / "one")
    with faults.fault("sync", errno.EIO, times=10**6):
        one.save(2, small_state(2))
        failed = one._saves.running
        assert failed is not None
        failed.wait_until_ended()
    with pytest.raises(SaveFailedError, match="one/step-2 before"):
        other.save(2, small_state(2))
    other.save(3, small_state(3))
    other.close()
    assert other.steps() == [1, 3]
    with pytest.raises(CheckpointError):
        one.close()


# --- What is copied while training goes on


def test_steps_of_an_optimizer_wait_at_the_gate(checkpoint: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(1000))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for async_checkpoint in (True, False):
        with CheckpointManager(checkpoint, async_checkpoint=async_checkpoint) as saver:
            before = weight.detach().clone()
            saver.save(1, {"weight": weight}, gate=optimizer)
            weight.grad = torch.ones(1000)
            optimizer.step()
        found = {"weight": torch.zeros(1000)}
        CheckpointManager(checkpoint).restore(found)
        assert torch.equal(found["weight"], before) and not torch.equal(before, weight)


# --- Restoring


def test_restoring_waits_for_the_save_that_goes_on(checkpoint: Path) -> None:
    save_steps(checkpoint, 1)
    with (
        CheckpointManager(checkpoint) as saver,
        held() as event,
        let_go_by(RunningSave, "wait_until_ended", event),
    ):
        saver.save(2, small_state(2))
        values = blank(small_state(0))
        assert not event.is_set() and saver.restore(values) == 2
        assert same(values, small_state(2))


@pytest.mark.parametrize("prepare", [True, False])
def test_the_first_save_after_restoring_plans_nothing(checkpoint: Path, prepare: bool) -> None:
    save_steps(checkpoint, 1)
    steps.no_plans_known().start()
    with CheckpointManager(checkpoint) as saver, counted_plans() as plans:
        values = blank(small_state(0))
        saver.restore(values, prepare=prepare)
        assert len(plans) == prepare
        memory = snapshot_memory()["touched_bytes"]
        saver.save(2, values)
        saver.wait()
        assert len(plans) == 1
        if prepare:
            assert 0 < memory == snapshot_memory()["touched_bytes"]


@contextlib.contextmanager
def counted_plans() -> Iterator[list[None]]:
    plans: list[None] = []
    plan = Planner.plan_all

    def counting(*args: Any) -> Any:
        plans.append(None)
        return plan(*args)

    with mock.patch.object(Planner, "plan_all", counting):
        yield plans


def test_a_state_that_cannot_be_planned_is_restored(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_steps(checkpoint, 1)
    with steps.failing("describe a state to prepare", RuntimeError("no state today")):
        assert restored(checkpoint) == (1, True)
    assert "no state today" in caplog.text


# --- Signals


def train(directory: Path, pause: Callable[[], None]) -> None:
    other = []
    signal.signal(signal.SIGTERM, lambda *_: other.append("called"))
    with CheckpointManager(directory, schedule=Schedule(1000, signal=signal.SIGTERM)) as saver:
        for step in range(1, 100):
            if step == 5:
                pause()
            saver.save(step, small_state(step))
            if saver.preempted:
                break
        assert step == 5 and saver.save(6, small_state(6)) is None
    assert other == ["called"]
    os.kill(os.getpid(), signal.SIGTERM)
    assert other == ["called", "called"]  # and again who was there before


def test_a_signal_leads_to_one_last_save(checkpoint: Path) -> None:
    child = Child(functools.partial(train, checkpoint))
    os.kill(child.pid, signal.SIGTERM)
    assert child.end() == 0
    assert restored(checkpoint) == (5, True) and steps_in(checkpoint) == [5]


@pytest.mark.usefixtures("ctrl_c")
def test_the_interrupt_of_the_keyboard_waits_for_the_save(checkpoint: Path) -> None:
    with CheckpointManager(checkpoint, schedule=Schedule(1000, signal=signal.SIGINT)) as saver:
        os.kill(os.getpid(), signal.SIGINT)
        saver.save(1, small_state(1))
        assert saver.preempted
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(BOUND)  # until it is there


def test_a_signal_that_was_ignored_leads_to_a_save_and_is_ignored_again(checkpoint: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with CheckpointManager(checkpoint, schedule=Schedule(1000, signal=signal.SIGINT)) as saver:
            os.kill(os.getpid(), signal.SIGINT)
            saver.save(1, small_state(1))
            assert saver.preempted and saver.steps() == [1]
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("whose", ["its own", "another manager's"])
def test_the_last_save_is_made_though_the_one_before_failed(
    checkpoint: Path, caplog: pytest.LogCaptureFixture, whose: str
) -> None:
    with CheckpointManager(checkpoint, schedule=Schedule(signal=signal.SIGTERM)) as saver:
        failing = saver if whose == "its own" else CheckpointManager(checkpoint)
        with faults.fault("sync", errno.EIO, times=10**6):
            handle = failing.save(1, small_state(1))
            assert handle is not None and handle.exception(BOUND) is not None
        os.kill(os.getpid(), signal.SIGTERM)
        handle = saver.save(2, small_state(2))
        assert saver.preempted and handle is not None and handle.done()
        assert "step-1 before this one failed" in caplog.text
    assert restored(checkpoint) == (2, True)


# --- Saves that are cancelled


@pytest.mark.parametrize("who", [0, 1])
@on_ranks(2)
def test_one_rank_cancels_the_save_of_all(checkpoint: Path, who: int) -> None:
    rank = dist.get_rank()
    with CheckpointManager(checkpoint) as saver:
        assert not saver.cancel()
        saver.save(1, small_state(1), metrics={"loss": 1})
        saver.wait()
        assert not saver.cancel()
        with held() as event:
            handle = saver.save(2, small_state(2), metrics={"loss": 2})
            assert handle is not None
            dist.barrier()
            said = saver.cancel() if rank == who else None
            dist.barrier()
            event.set()
            told = ""
            try:
                saver.wait()
            except SaveCancelledError as error:
                told = type(error).__name__
            saver.wait()
            with pytest.raises(SaveCancelledError):
                handle.result(BOUND)
        dist.barrier()
        left = sorted(path.name for path in checkpoint.iterdir())
        dist.barrier()
        saver.save(3, small_state(3))
        saver.save(4, small_state(4))
    dist.barrier()
    assert said is (True if rank == who else None)
    assert told == ("" if rank == who else "SaveCancelledError")
    assert (left, saver.steps(), saver.metrics(1)) == (["step-1"], [1, 3, 4], {"loss": 1})


def test_a_step_that_is_saved_again_stays_when_that_is_cancelled(checkpoint: Path) -> None:
    save_steps(checkpoint, 1)
    with CheckpointManager(checkpoint) as saver, held() as event:
        saver.save(1, small_state(5))
        assert saver.cancel()
        event.set()
    assert restored(checkpoint) == (1, True) and steps_in(checkpoint) == [1]


def test_a_manager_of_an_object_store_cancels(url: str) -> None:
    pytest.importorskip("obstore", reason="object stores need obstore")
    with CheckpointManager(url) as saver:
        saver.save(1, small_state(1))
        saver.wait()
        with held() as event:
            saver.save(2, small_state(2), metrics={"loss": 2})
            assert saver.cancel()
            event.set()
            saver.wait()
        assert saver.steps() == [1] and saver.latest() == 1
        saver.save(3, small_state(3))
    assert saver.steps() == [1, 3]
