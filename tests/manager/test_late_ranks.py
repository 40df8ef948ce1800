"""A collective call that one rank makes alone says which ranks are late. All public calls are listed here."""

from __future__ import annotations

import inspect
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.ranks import run_ranks

import vescale_ckpt
from vescale_ckpt import CheckpointManager, Schedule

Call = Callable[[Path, CheckpointManager], object]


def _state() -> dict[str, Any]:
    return {"w": torch.ones(4)}


#: Calls that all ranks make together: in the manager's process group.
COLLECTIVE: dict[str, Call] = {
    "save": lambda path, of: vescale_ckpt.save(path / "a", _state(), fingerprint=True, process_group=of.process_group),
    "load": lambda path, of: vescale_ckpt.load(path / "a", _state(), process_group=of.process_group),
    "prepare": lambda path, of: vescale_ckpt.prepare(_state(), process_group=of.process_group),
    "fingerprint": lambda _, of: vescale_ckpt.fingerprint(_state(), process_group=of.process_group),
    "prove": lambda path, of: vescale_ckpt.prove(path / "a", _state(), process_group=of.process_group),
    "convert": lambda path, of: vescale_ckpt.convert(
        path / "a", path / "converted", format="safetensors", overwrite=True, process_group=of.process_group
    ),
    "CheckpointManager.should_save": lambda _, manager: manager.should_save(1),
    "CheckpointManager.save": lambda _, manager: manager.save(1, _state(), metrics={"loss": 1.0}, force=True),
    "CheckpointManager.best_step": lambda _, manager: manager.best_step(),
    "CheckpointManager.latest": lambda _, manager: manager.latest(),
    "CheckpointManager.restore": lambda _, manager: manager.restore(_state()),
}
#: Calls that need no other rank, or wait only for the end of this rank's own part of a save.
ALONE = {
    *("copy", "inspect", "register_store", "verify"),
    *(f"CheckpointManager.{name}" for name in ("cancel", "close", "metrics", "steps", "tiers", "wait")),
    "CheckpointManager.losses_survived",  # with a folder of each node all ranks call it: test_node_tier.py
}


def test_every_public_call_is_listed() -> None:
    public = {name for name in vescale_ckpt.__all__ if inspect.isfunction(getattr(vescale_ckpt, name))}
    methods = {name for name, value in vars(CheckpointManager).items() if inspect.isfunction(value) and name[0] != "_"}
    assert public | {f"CheckpointManager.{name}" for name in methods} == {*COLLECTIVE, *ALONE}


@contextmanager
def _lines(reported: Path) -> Iterator[list[str]]:
    """The warnings about late ranks. `reported` is made with the first."""
    found: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING and "waits for" in record.getMessage():
                found.append(record.getMessage())
                reported.touch()

    logger, handler = logging.getLogger("vescale_ckpt"), Handler()
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


def _one_comes_late(path: Path, late: int, connected: bool) -> dict[str, list[str]]:
    """One rank makes each call alone, until a line names the other. `connected`: the ranks have made the call before;
    how they connect is the same for all calls. Returns the lines of this rank."""
    is_late, told = dist.get_rank() == late, {}

    def manager() -> CheckpointManager:
        options = {"schedule": Schedule(seconds=1000), "best": "loss", "best_mode": "min", "async_checkpoint": False}
        group = dist.new_group(backend="gloo")
        return CheckpointManager(path / "run", process_group=group, **options)  # type: ignore[arg-type]

    kept = manager()
    for name in ("save", "CheckpointManager.save", *(COLLECTIVE if connected else ())):
        COLLECTIVE[name](path, kept)
    os.environ["VESCALE_CKPT_REPORT_SECONDS"] = "1"
    for name, call in COLLECTIVE.items() if connected else [*COLLECTIVE.items()][::4]:
        reported, of = path / f"{name}.reported", kept if connected else manager()
        deadline = time.monotonic() + 20
        with _lines(reported) as told[name]:
            while is_late and not reported.exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            call(path, of)
    return told


@pytest.mark.parametrize(("late", "connected"), [(0, True), (1, False)])
def test_a_rank_that_calls_alone_names_the_late_one(tmp_path: Path, late: int, connected: bool) -> None:
    answers = run_ranks(2, _one_comes_late, tmp_path, late, connected)
    assert not any(answers[late].values()), answers[late]
    for name, lines in answers[1 - late].items():
        assert lines, name
        assert f"rank {1 - late} of 2 is in" in lines[0] and f"waits for rank {late} of 2" in lines[0], lines
        assert "all ranks must call it" in lines[0], lines
