"""A collective call that one rank makes alone says which ranks are late. All public calls are listed here."""

from __future__ import annotations

import inspect
import logging
import os
import threading
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
from vescale_ckpt import CheckpointManager
from vescale_ckpt._ranks.exchange import Exchange

Call = Callable[[Path, CheckpointManager], object]


def _state() -> dict[str, Any]:
    return {"w": torch.ones(4)}


#: Calls that all ranks make together: in the manager's process group.
COLLECTIVE: dict[str, Call] = {
    "save": lambda path, of: vescale_ckpt.save(path / "a", _state(), process_group=of.process_group),
    "load": lambda path, of: vescale_ckpt.load(path / "a", _state(), process_group=of.process_group),
    "prepare": lambda path, of: vescale_ckpt.prepare(_state(), process_group=of.process_group),
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


@pytest.mark.parametrize("name", COLLECTIVE)
def test_the_docstring_says_that_all_ranks_call_it(name: str) -> None:
    holder, _, method = name.rpartition(".")
    call = getattr(getattr(vescale_ckpt, holder) if holder else vescale_ckpt, method)
    assert "call it together" in " ".join((inspect.getdoc(call) or "").split())
    if holder:
        page = (Path(__file__).parents[2] / "docs/howto/manager.md").read_text()
        assert f"| `{method}` | all ranks" in page


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
    """One rank makes each call alone, until a line names the other. `connected`: the ranks have made the call before.
    Returns the lines of this rank."""
    is_late, told = dist.get_rank() == late, {}

    def manager() -> CheckpointManager:
        options = {"save_interval_seconds": 1000.0, "best": "loss", "best_mode": "min", "async_checkpoint": False}
        group = dist.new_group(backend="gloo")
        return CheckpointManager(path / "run", process_group=group, **options)  # type: ignore[arg-type]

    kept = manager()
    for name in ("save", "CheckpointManager.save", *(COLLECTIVE if connected else ())):
        COLLECTIVE[name](path, kept)
    os.environ["VESCALE_CKPT_REPORT_SECONDS"] = "1"
    for name, call in COLLECTIVE.items():
        reported, of = path / f"{name}.reported", kept if connected else manager()
        deadline = time.monotonic() + 20
        with _lines(reported) as told[name]:
            while is_late and not reported.exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            call(path, of)
    return told


def _copies_take_long(path: Path) -> list[str]:
    """Another node gets a large file, in the background."""
    os.environ["VESCALE_CKPT_REPORT_SECONDS"] = "1"

    def copy() -> None:
        for name in ("first", "second"):  # the ranks connect before
            if dist.get_rank() == 1:
                time.sleep(1.5)
            Exchange.of(None, 20, "copies").agree([1], name)

    with _lines(path / "reported") as told:
        thread = threading.Thread(target=copy, name="vescale_ckpt copies")
        thread.start()
        thread.join()
    return told


def test_copies_in_the_background_make_no_lines(tmp_path: Path) -> None:
    assert run_ranks(2, _copies_take_long, tmp_path) == [[], []]


@pytest.mark.parametrize("connected", [True, False])
@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_calls_alone_names_the_late_one(tmp_path: Path, late: int, connected: bool) -> None:
    answers = run_ranks(2, _one_comes_late, tmp_path, late, connected)
    assert not any(answers[late].values()), answers[late]
    for name, lines in answers[1 - late].items():
        assert lines, name
        assert f"rank {1 - late} of 2 is in" in lines[0] and f"waits for rank {late} of 2" in lines[0], lines
        assert "all ranks must call it" in lines[0], lines
