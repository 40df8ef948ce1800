"""Collective calls that not all ranks make: the error names what each called, and the next right call works."""

from __future__ import annotations

import contextlib
import itertools
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import steps
from harness.ranks import on_ranks, run_ranks
from harness.saves import error_of

import vescale_ckpt
from vescale_ckpt import CheckpointManager, Schedule

TIMEOUT = 0.4  # seconds after which ranks give up where they call different things
FOREVER = 60.0


def _state() -> dict[str, Any]:
    return {"all": torch.arange(64.0), f"of {dist.get_rank()}": torch.ones(8)}


def _zeros() -> dict[str, Any]:
    return {key: torch.zeros_like(value) for key, value in _state().items()}


class _Job:
    """What one rank can call. `timeout`: of the calls."""

    def __init__(self, directory: Path) -> None:
        self.timeout = FOREVER
        self._directory = directory
        options = {"schedule": Schedule(seconds=0), "best": "loss", "best_mode": "min", "async_checkpoint": False}
        self._manager = CheckpointManager(directory / "run", **options)  # type: ignore[arg-type]
        self._step = 0
        self.save()
        self.manager_save()

    def save(self, name: str = "a", **options: Any) -> None:
        vescale_ckpt.save(self._directory / name, _state(), timeout=self.timeout, **options).result()

    def save_elsewhere(self) -> None:
        self.save("b")

    def save_async(self) -> None:
        self.save(async_checkpoint=True)

    def save_if_free(self) -> None:
        self.save(on_busy="raise")

    def load(self, **options: Any) -> None:
        state = _zeros()
        vescale_ckpt.load(self._directory / "a", state, timeout=self.timeout, **options)
        assert all(torch.equal(state[key], value) for key, value in _state().items())

    def load_by_broadcast(self) -> None:
        self.load(broadcast_checkpoint=True)

    def prepare(self) -> None:
        vescale_ckpt.prepare(_state(), timeout=self.timeout)

    def convert(self) -> None:
        destination = self._directory / "converted"
        vescale_ckpt.convert(
            self._directory / "a", destination, format="safetensors", overwrite=True, timeout=self.timeout
        )

    @property
    def manager(self) -> CheckpointManager:
        self._manager._ranks.timeout = self.timeout
        return self._manager

    def manager_save(self) -> None:
        self.manager.save(self._step, _state(), metrics={"loss": 0.0}, force=True)

    def should_save(self) -> None:
        assert self.manager.should_save(self._step)

    def latest(self) -> None:
        assert self.manager.latest() == self._step

    def best_step(self) -> None:
        assert self.manager.best_step() == self._step

    def restore(self) -> None:
        assert self.manager.restore(_zeros()) == self._step

    def restore_a_step(self) -> None:
        assert self.manager.restore(_zeros(), self._step, prepare=False) == self._step


CALLS = [name for name, value in vars(_Job).items() if callable(value) and not name.startswith("_")]
ALIKE = {"save", "save_async"}  #: they meet: each rank saves as it was asked to


def _mixed_up(directory: Path, pairs: list[tuple[str, str]], confused: int) -> list[str]:
    """The confused rank calls the second of each pair, and the others the first. Then all call both. No rank waits for
    another in between. Returns what went wrong."""
    job, wrong = _Job(directory), []
    for pair in pairs:
        job.timeout = FOREVER if set(pair) == ALIKE else TIMEOUT
        error = error_of(getattr(job, pair[dist.get_rank() == confused]))
        if (error is None) != (set(pair) == ALIKE):
            wrong.append(f"{pair}: {error}")
        if error is not None and not re.search("last seen in: |in different places: |with different", str(error)):
            wrong.append(f"{pair}: it does not say what the others called: {error}")
        job.timeout = FOREVER
        for name in pair:
            if (error := error_of(getattr(job, name))) is not None:
                wrong.append(f"after {pair}: {name}: {type(error).__name__}: {error}")
    dist.barrier()
    wrong.extend(f"left: {path}" for path in directory.rglob("*tmp*"))
    return wrong


def _check(ranks: int, directory: Path, pairs: list[tuple[str, str]], confused: int) -> None:
    wrong = run_ranks(ranks, _mixed_up, directory, pairs, confused)
    assert not any(wrong), "\n".join(f"rank {rank}: {text}" for rank, texts in enumerate(wrong) for text in texts)


PAIRS = list(itertools.combinations(CALLS, 2))


@pytest.mark.parametrize("share", [0, 1, *(pytest.param(share, marks=pytest.mark.slow) for share in (2, 3))])
def test_after_calls_that_differ_the_next_right_ones_work(tmp_path: Path, share: int) -> None:
    _check(2, tmp_path, PAIRS[share::4], share % 2)


@pytest.mark.parametrize("confused", [0, 2])
def test_one_of_three_ranks_is_confused(tmp_path: Path, confused: int) -> None:
    pairs = [
        ("save", "load"), ("load_by_broadcast", "save_async"), ("manager_save", "restore"), ("latest", "manager_save"),
        ("prepare", "save"), ("save", "save_elsewhere"), ("convert", "best_step"),
    ]  # fmt: skip
    _check(3, tmp_path, pairs, confused)


@on_ranks(2)
def test_a_save_in_the_background_goes_on(tmp_path: Path) -> None:
    job, release = _Job(tmp_path), threading.Event()
    with steps.before("write what was staged", lambda _: release.wait(FOREVER)):
        handle = vescale_ckpt.save(tmp_path / "c", _state(), async_checkpoint=True, timeout=FOREVER)
        job.timeout = TIMEOUT
        assert error_of(job.latest if dist.get_rank() else job.load) is not None
        job.timeout = FOREVER
        release.set()
    handle.result(FOREVER)
    after = [job.load, job.save_async, job.latest, job.save]
    assert [str(error) for error in map(error_of, after) if error is not None] == []


@on_ranks(2)
def test_a_rank_without_the_store_counts_failures_as_others_do(tmp_path: Path) -> None:
    """Rank 1 writes too late, and does not reach the store to learn why the save has failed."""
    job = _Job(tmp_path)
    job.load()
    with contextlib.ExitStack() as stack:
        if dist.get_rank() == 1:
            stack.enter_context(steps.before("write tensors", lambda *_: time.sleep(4 * TIMEOUT)))
            for step in ("ask the store for the failure", "settle the failure"):
                stack.enter_context(steps.failing(step, steps.StoreGoneError()))
        handle = vescale_ckpt.save(tmp_path / "c", _state(), async_checkpoint=True, timeout=TIMEOUT)
        assert error_of(lambda: handle.result(FOREVER)) is not None
    job.timeout = FOREVER
    after = [job.load, job.latest, job.save_async]
    assert [f"{call.__name__}: {error}" for call in after if (error := error_of(call)) is not None] == []
