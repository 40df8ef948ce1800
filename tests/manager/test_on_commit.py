"""`on_commit` of a manager: who is called, when, what stays meanwhile, and a push to a repository that fails."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.python_forks import run_python
from harness.ranks import on_ranks
from harness.states import small_state

import vescale_ckpt
from vescale_ckpt import CheckpointError, CheckpointManager

PATIENCE = 120.0  # seconds


class Held:
    """A function that does not return before it is released."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, str, str]] = []
        self.entered, self.released = threading.Event(), threading.Event()

    def __call__(self, step: int, path: str) -> None:
        self.calls.append((step, path, threading.current_thread().name))
        self.entered.set()
        assert self.released.wait(PATIENCE)


def test_it_is_called_beside_the_training_for_each_checkpoint_in_order(tmp_path: Path) -> None:
    held = Held()
    with CheckpointManager(tmp_path, on_commit=held) as manager:
        manager.save(1, small_state(1))
        assert held.entered.wait(PATIENCE)
        for step in (2, 3):
            manager.save(step, small_state(step))
        manager.wait()
        assert manager.steps() == [1, 2, 3] and len(held.calls) == 1  # saves do not wait for it
        held.released.set()
    assert [(step, path) for step, path, _ in held.calls] == [
        (step, str(tmp_path / f"step-{step}")) for step in (1, 2, 3)
    ]
    assert {name for *_, name in held.calls} == {"vescale_ckpt on_commit"}


def test_a_checkpoint_stays_during_its_call_and_one_that_is_gone_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    held = Held()
    with CheckpointManager(tmp_path, max_to_keep=1, on_commit=held) as manager:
        manager.save(1, small_state(1))
        assert held.entered.wait(PATIENCE)
        for step in (2, 3):
            manager.save(step, small_state(step))
        manager.wait()
        assert manager.steps() == [1, 3]
        loaded = vescale_ckpt.load(tmp_path / "step-1")
        assert torch.equal(loaded["model"]["weight"], small_state(1)["model"]["weight"])
        held.released.set()
    assert [step for step, *_ in held.calls] == [1, 3]
    assert "on_commit is not called for step 2, which retention has removed" in caplog.text
    with CheckpointManager(tmp_path, max_to_keep=1) as manager:
        manager.save(4, small_state(4))
        manager.wait()
        assert manager.steps() == [4]


@on_ranks(2)
def test_the_coordinator_alone_calls_it(tmp_path: Path) -> None:
    calls: list[int] = []
    with CheckpointManager(tmp_path, on_commit=lambda step, _: calls.append(step)) as manager:
        manager.save(1, small_state(1))
    assert calls == ([1], [])[dist.get_rank()]


def test_a_save_that_fails_calls_nothing(tmp_path: Path) -> None:
    calls: list[int] = []
    with CheckpointManager(tmp_path, on_error="warn", on_commit=lambda step, _: calls.append(step)) as manager:
        (tmp_path / "step-1").write_bytes(b"")  # a file in the folder's place
        manager.save(1, small_state(1))
        manager.wait()
        assert manager.failed_saves == 1
        manager.save(2, small_state(2))
    assert calls == [2]


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_errors_are_logged_and_raised_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, on_error: Any
) -> None:
    def fails_once(step: int, _: str) -> None:
        if step == 1:
            raise RuntimeError("the registry is away")

    manager = CheckpointManager(tmp_path, on_error=on_error, on_commit=fails_once)
    for step in (1, 2):
        manager.save(step, small_state(step))
    if on_error == "raise":
        with pytest.raises(CheckpointError, match=r"on_commit failed for steps 1, .* whole in .*registry is away"):
            manager.close()
    manager.close()
    assert "on_commit failed for step 1: RuntimeError: the registry is away" in caplog.text
    assert manager.steps() == [1, 2]


def test_a_call_that_does_not_end_holds_up_neither_close_nor_the_next_manager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VESCALE_CKPT_EXIT_TIMEOUT", "1")
    held = Held()
    with CheckpointManager(tmp_path, on_commit=held) as manager:
        for step in (1, 2):
            manager.save(step, small_state(step))
            assert held.entered.wait(PATIENCE)
    assert "on_commit has not returned after 1 s: 1 calls are not made" in caplog.text
    held.released.set()
    assert [step for step, *_ in held.calls] == [1]


def test_what_is_no_function_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="on_commit: expected a function of a step and a path, got str"):
        CheckpointManager(tmp_path, on_commit="notify")  # type: ignore[arg-type]


def test_the_end_of_a_process_waits_for_a_call(tmp_path: Path) -> None:
    script = f"""
import time, torch, vescale_ckpt
def called(step, path):
    time.sleep(1)
    open({str(tmp_path / "called")!r}, "w").write(path)
manager = vescale_ckpt.CheckpointManager({str(tmp_path / "run")!r}, on_commit=called)
manager.save(1, {{"w": torch.ones(100000)}})
"""
    assert run_python([sys.executable, "-c", script], timeout=PATIENCE).returncode == 0
    assert (tmp_path / "called").read_text() == str(tmp_path / "run" / "step-1")
