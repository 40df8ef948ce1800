"""Asynchronous saves of several ranks: all learn of a failure, wherever it was, and none is left waiting."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import faults, steps
from harness.ranks import on_ranks, run_ranks
from harness.saves import load, loads, save
from harness.states import state_of_rank, whole_state

import vescale_ckpt
from vescale_ckpt import CheckpointError, SaveInProgressError

BOUND = 60.0  # seconds after which something counts as hung


def _fails_unseen(directory: str) -> list[str]:
    """Each attempt to save, of which the first fails on rank 1: rank 2 does not ask for its result."""
    told: list[str] = []
    for k in (2, 3, 4):
        if k == 2 and dist.get_rank() == 1:
            faults.inject("write", errno.EIO, 0, 1000)
        try:
            handle = vescale_ckpt.save(directory, state_of_rank(k), async_checkpoint=True)
            error = handle.exception(BOUND)
            if error is not None and dist.get_rank() != 2:
                handle.result()
        except CheckpointError as raised:
            error = raised
        told.append("" if error is None else f"{type(error).__name__} {getattr(error, 'rank', None)}")
        faults.clear()
    dist.barrier()
    return told


def test_a_failure_that_one_rank_has_not_seen_is_raised_by_the_next_save_of_all(checkpoint: Path) -> None:
    save(checkpoint, whole_state(1))
    for failed, second, third in run_ranks(4, _fails_unseen, str(checkpoint)):
        assert failed == "CheckpointError 1" and second.startswith("SaveFailedError") and third == ""
    assert loads(checkpoint, whole_state(4))


def _dies(directory: str, who: int) -> Any:
    rank = dist.get_rank()
    if rank == 0:
        save(directory, whole_state(1))
    dist.barrier()
    last_act = steps.before("write what was staged", lambda _: os.kill(os.getpid(), signal.SIGKILL))
    with last_act if rank == who else contextlib.nullcontext():
        handle = vescale_ckpt.save(directory, state_of_rank(2), async_checkpoint=True)
        error = handle.exception(BOUND)
    return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("who", [0, 3])
def test_a_rank_that_dies_is_named(checkpoint: Path, who: int) -> None:
    answers = run_ranks(4, _dies, str(checkpoint), who, check=False)
    for rank, answer in enumerate(answers):
        assert rank == who or (f"rank {who} of 4" in answer and "CheckpointTimeoutError" in answer), answers
    assert loads(checkpoint, whole_state(1))


@pytest.mark.parametrize(("on_busy", "first"), [("skip", True), ("raise", "raised")])
@on_ranks(4)
def test_all_ranks_skip_a_save_or_none(checkpoint: Path, on_busy: str, first: object) -> None:
    """Only rank 1's save goes on when the next one begins."""
    release = threading.Event()
    late = steps.before("write what was staged", lambda _: release.wait(BOUND))
    with late if dist.get_rank() == 1 else contextlib.nullcontext():
        saving = vescale_ckpt.save(checkpoint, state_of_rank(1), async_checkpoint=True)
        told: list[object] = []
        try:
            told.append(vescale_ckpt.save(checkpoint, state_of_rank(2), on_busy=on_busy).skipped)
        except SaveInProgressError:
            told.append("raised")
        release.set()
        saving.result(BOUND)
    told.append(vescale_ckpt.save(checkpoint, state_of_rank(3), on_busy=on_busy).skipped)
    assert loads(checkpoint, whole_state(3))
    assert told == [first, False]


@on_ranks(4)
def test_groups_save_at_the_same_time(checkpoint: Path) -> None:
    """A save of each group goes on at the same time."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[rank // 2]
    handles = [
        vescale_ckpt.save(f"{checkpoint} {rank // 2}", {"value": torch.full((1000,), rank // 2), "step": k},
                          async_checkpoint=True, process_group=mine)
        for k in range(3)
    ]  # fmt: skip
    everyone = vescale_ckpt.save(checkpoint, state_of_rank(7), async_checkpoint=True)
    assert [handle.result(BOUND).seconds > 0 for handle in (*handles, everyone)] == [True] * 4
    assert loads(checkpoint, whole_state(7))
    found = load(f"{checkpoint} {rank // 2}", {"value": torch.zeros(1000, dtype=torch.int64), "step": 0})
    assert found["step"] == 2 and found["value"].eq(rank // 2).all()
