"""Asynchronous saves of one process: what was there when the call was made is saved, whatever happens afterwards."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from harness import faults, snapshots, steps
from harness.children import in_child
from harness.files import only_named_files
from harness.saves import load
from harness.snapshots import no_snapshot_is_left, snapshot_memory
from harness.states import change_all, many_kinds, same, state
from torch import nn

import vescale_ckpt
from vescale_ckpt import CheckpointError, SaveFailedError, SaveInProgressError, StorageFullError
from vescale_ckpt._plan.planner import Planner

BOUND = 180.0  # seconds after which something counts as hung
SAVES = int(os.environ.get("VESCALE_CKPT_TEST_ASYNC_SAVES", "60"))


@pytest.fixture
def held() -> Iterator[threading.Event]:
    with snapshots.held() as event:
        yield event


@pytest.mark.parametrize("budget", [None, 1 << 20, 1])
def test_later_changes_do_not_reach_the_file(
    checkpoint: Path, held: threading.Event, monkeypatch: pytest.MonkeyPatch, budget: int | None
) -> None:
    if budget is not None:
        monkeypatch.setenv("VESCALE_CKPT_SNAPSHOT_BYTES", str(budget))
    values = many_kinds(1)
    handle = vescale_ckpt.save(checkpoint, values, async_checkpoint=True)
    assert handle.staged.done() and not handle.done()
    change_all(values)
    held.set()
    stats = handle.result(BOUND)
    assert stats.bytes == sum(t.nbytes for t in _tensors(many_kinds(1)))
    assert same(load(checkpoint, many_kinds(0)), many_kinds(1))


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (dict, list)):
        for item in values.values() if isinstance(values, dict) else values:
            yield from _tensors(item)


def test_memory_of_a_failed_save_is_free_again(checkpoint: Path) -> None:
    faults.inject("sync", errno.EIO, 0, 100)
    handle = vescale_ckpt.save(checkpoint, state(1), async_checkpoint=True)
    with pytest.raises(CheckpointError) as raised:
        handle.result(BOUND)
    assert raised.value.__traceback__ is not None
    assert no_snapshot_is_left()


def test_progress_never_goes_back(checkpoint: Path, held: threading.Event) -> None:
    faults.inject("sync", errno.EIO, 0, 1000)
    failing = vescale_ckpt.save(checkpoint, state(1), async_checkpoint=True)
    before = failing.progress()
    held.set()
    with pytest.raises(CheckpointError):
        failing.result(BOUND)
    assert failing.progress() >= before > (0, 0)


def test_what_a_handle_tells_before_its_save_is_done_and_then(checkpoint: Path, held: threading.Event) -> None:
    called: list[Any] = []
    done = threading.Event()
    values = state(1)
    total = sum(tensor.nbytes for tensor in _tensors(values))
    handle = vescale_ckpt.save(checkpoint, values, async_checkpoint=True)
    handle.add_done_callback(lambda h: (called.append((h, h.done())), done.set()))
    with pytest.raises(TimeoutError):
        handle.result(0.01)
    assert not called and not handle.done() and handle.progress() == (0, total)
    held.set()
    handle.result(BOUND)
    assert done.wait(BOUND) and called == [(handle, True)] and handle.progress() == (total, total)
    assert vescale_ckpt.save(checkpoint, values).progress() == (total, total)


# --- One after another


def test_a_warning_says_how_much_exceeds_the_budget(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VESCALE_CKPT_SNAPSHOT_BYTES", str(4 << 20))
    values = {str(number): torch.ones(1 << 18) for number in range(10)}
    vescale_ckpt.save(checkpoint, values, async_checkpoint=True).result(BOUND)
    assert "6 MiB of 10 MiB were written before training went on: snapshots may take 4 MiB" in caplog.text


def test_the_next_save_waits(checkpoint: Path, held: threading.Event) -> None:
    first = vescale_ckpt.save(checkpoint, state(1), async_checkpoint=True)
    threading.Timer(0.2, held.set).start()
    second = vescale_ckpt.save(checkpoint, state(2), async_checkpoint=True)
    assert first.done()
    second.result(BOUND)
    assert same(load(checkpoint, state(0)), state(2))


def test_a_save_that_need_not_wait(checkpoint: Path, held: threading.Event, caplog: pytest.LogCaptureFixture) -> None:
    first = vescale_ckpt.save(checkpoint, state(1), async_checkpoint=True)
    with pytest.raises(SaveInProgressError):
        vescale_ckpt.save(checkpoint, state(2), on_busy="raise")
    skipped = vescale_ckpt.save(checkpoint, state(2), async_checkpoint=True, on_busy="skip")
    assert skipped.skipped and skipped.done() and skipped.staged.done()
    assert "skipped" in caplog.text
    with pytest.raises(SaveInProgressError):
        skipped.result()
    held.set()
    first.result(BOUND)
    assert not vescale_ckpt.save(checkpoint, state(3), on_busy="skip").skipped
    assert same(load(checkpoint, state(0)), state(3))


def test_waiting_for_the_last_save_has_an_end(checkpoint: Path, held: threading.Event) -> None:
    handle = vescale_ckpt.save(checkpoint, state(1), async_checkpoint=True)
    with pytest.raises(vescale_ckpt.CheckpointTimeoutError, match=str(checkpoint)):
        vescale_ckpt.save(checkpoint, state(2), timeout=0.05)
    held.set()
    handle.result(BOUND)
    vescale_ckpt.save(checkpoint, state(3))


# --- Failures


@pytest.mark.parametrize("call", ["open", "write", "allocate", "sync", "rename", "space"])
@pytest.mark.parametrize("seen", [True, False])
def test_a_failed_save_is_told_once_and_harms_nothing(checkpoint: Path, call: str, seen: bool) -> None:
    vescale_ckpt.save(checkpoint, state(1))
    faults.inject(call, errno.ENOSPC, 0, 1000)
    handle = vescale_ckpt.save(checkpoint, state(2), async_checkpoint=True)
    assert handle.staged.done()
    if seen:
        with pytest.raises(StorageFullError if call in ("write", "allocate") else CheckpointError):
            handle.result(BOUND)
    else:
        handle.exception(BOUND)
    faults.clear()
    assert same(load(checkpoint, state(0)), state(1))
    if not seen:
        with pytest.raises(SaveFailedError, match="before this one"):
            vescale_ckpt.save(checkpoint, state(3), async_checkpoint=True)
    vescale_ckpt.save(checkpoint, state(4), async_checkpoint=True).result(BOUND)
    assert same(load(checkpoint, state(0)), state(4))
    assert only_named_files(checkpoint)


# --- Gates


def test_steps_go_on_when_copying_cannot_begin(checkpoint: Path) -> None:
    weight = nn.Parameter(torch.ones(1000))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    steps.failing("start to copy", MemoryError()).start()
    handle = vescale_ckpt.save(checkpoint, {"weight": weight}, async_checkpoint=True, gate=optimizer)
    optimizer.step()
    with pytest.raises(SaveFailedError, match="MemoryError"):
        handle.result(BOUND)
    assert no_snapshot_is_left()


# --- Processes that end


def test_a_forked_child_has_no_save_going_on(checkpoint: Path, held: threading.Event) -> None:
    handle = vescale_ckpt.save(checkpoint, state(1), async_checkpoint=True)

    def child() -> None:
        vescale_ckpt.save(f"{checkpoint} of the child", state(2))

    in_child(child)
    held.set()
    handle.result(BOUND)
    assert same(load(checkpoint, state(0)), state(1))
    assert same(load(Path(f"{checkpoint} of the child"), state(0)), state(2))


def test_nothing_grows(checkpoint: Path) -> None:
    def sizes() -> tuple[int, int, int]:
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return threading.active_count(), len(os.listdir("/proc/self/fd")), resident

    values = state(0)
    before = None
    for number in range(SAVES):
        values["step"] = number
        handle = vescale_ckpt.save(checkpoint, values, async_checkpoint=True)
        if number == 20:
            handle.result(BOUND)
            before = sizes()
    handle.result(BOUND)
    assert before is not None
    threads, files, resident = sizes()
    assert threads <= before[0] and files <= before[1]
    assert resident - before[2] < 16 << 20
    assert load(checkpoint, state(0))["step"] == SAVES - 1
    assert only_named_files(checkpoint)


def test_prepared_saves_need_no_planning(checkpoint: Path) -> None:
    values = {**state(1), "another": torch.ones(7)}
    vescale_ckpt.prepare(values)
    memory = snapshot_memory()
    assert memory["touched_bytes"] >= sum(tensor.nbytes for tensor in _tensors(values))
    assert no_snapshot_is_left()
    with mock.patch.object(Planner, "plan_all", side_effect=AssertionError("it plans")):
        vescale_ckpt.save(checkpoint, values, async_checkpoint=True).result(BOUND)
    assert snapshot_memory()["touched_bytes"] == memory["touched_bytes"]
    assert not checkpoint.joinpath("x").exists() and same(load(checkpoint, state(0)), state(1))
