"""Saves that fail on one rank, in every phase, and the saves after them; ranks that die; and that nothing grows."""

from __future__ import annotations

import errno
import gc
import os
import resource
import signal
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import faults, saves, steps
from harness.files import only_named_files
from harness.ranks import RankDiedError, on_ranks, run_ranks
from harness.saves import load_blank
from harness.states import assert_same
from test_planning import BOUND, WAYS, replicated, save
from torch.distributed.checkpoint.api import CheckpointException

import vescale_ckpt
from vescale_ckpt import CheckpointError, CheckpointTimeoutError, LoadPlanner, PerRank, SavePlanner, StorageReader

ERRORS = (CheckpointError, CheckpointException)


class _Bomb:
    """Explodes when it is pickled."""

    def __reduce__(self) -> Any:
        raise ZeroDivisionError("a bomb")


class _BadState:
    def state_dict(self) -> dict[str, Any]:
        raise ZeroDivisionError("no state")

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def _broken(state: dict[str, Any], phase: str) -> None:
    if phase == "flatten":
        state["nested.text"] = 1  # a key twice
    elif phase == "pickle":
        state[f"of rank {dist.get_rank()}"] = _Bomb()
    elif phase == "describe":
        state["scalar"] = torch.empty(3, dtype=torch.float32).to_sparse()
    elif phase == "freed":
        state["table"].untyped_storage().resize_(0)
    elif phase == "per rank":
        state["rng"] = PerRank(_BadState())
    elif phase == "stage":
        steps.failing("stage", RuntimeError("no copy")).start()
    elif phase != "metadata":
        faults.inject(phase, errno.EIO, times=1000)


def _room_for_half(content: bytes, _index: bytes) -> Any:
    """For `steps.around_metadata`: the file finds room for half of it."""
    return faults.files_of_at_most(len(content) // 2)


FAILURES = [
    *((phase, way, broken) for phase in ("flatten", "pickle", "describe", "freed", "per rank", "write")
      for way, broken in (("dcp", 1), ("ours", 0))),
    *((phase, "async", 1) for phase in ("pickle", "describe", "stage", "open", "write", "sync")),
    *((phase, way, 0) for phase in ("metadata", "rename") for way in (*WAYS, "async")),  # by the coordinator
]  # fmt: skip


@pytest.mark.parametrize(("phase", "way", "broken"), FAILURES)
@on_ranks(2, timeout=BOUND)
def test_after_a_failure_on_one_rank_saves_go_on(tmp_path: Path, phase: str, way: str, broken: int) -> None:
    planner = SavePlanner()
    path = f"{tmp_path}/c"

    def state_of(k: int) -> dict[str, Any]:
        return {**replicated(k), f"of rank {dist.get_rank()}": {1, k}}

    for k in range(2):
        save(way, path, state_of(k), planner)
    state = state_of(2)
    if dist.get_rank() == broken:
        _broken(state, phase)
    has_no_room = phase == "metadata" and dist.get_rank() == broken
    with steps.around_metadata(_room_for_half) if has_no_room else nullcontext(), pytest.raises(ERRORS) as caught:
        save(way, path, state, planner)
    faults.clear()
    mock.patch.stopall()
    assert f"rank {broken}" in str(caught.value) or list(caught.value.failures) == [broken]  # type: ignore[union-attr]
    del caught  # its traceback holds the writer, which holds its lock
    old = state_of(1)
    assert_same(load_blank(path, old), old)
    for k in (3, 4):
        state = state_of(k)
        save(way, path, state, planner)
        assert_same(load_blank(path, state), state)
    left = {name for name in os.listdir(path) if name.endswith(".distcp")}
    assert len(left) == 2, left


def _die(directory: str, phase: str, who: int) -> None:
    path = f"{directory}/c"
    old = replicated(1)
    vescale_ckpt.save(path, old)
    if dist.get_rank() == who and phase == "within the metadata":
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # the write behind the middle kills the process
        steps.around_metadata(_room_for_half).start()
    elif dist.get_rank() == who:
        act = steps.behind if phase == "finish files" else steps.before
        act(phase, lambda *_, **__: os.kill(os.getpid(), 9)).start()
    with pytest.raises(CheckpointTimeoutError) as caught:
        vescale_ckpt.save(path, replicated(2), timeout=10 * BOUND)
    assert caught.value.late_ranks == [who], caught.value
    assert_same(saves.load(path, old), old)


@pytest.mark.parametrize(
    ("phase", "who"),
    [
        *(("agree", 1), ("finish files", 1), ("within the metadata", 0)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("open files", 2), ("commit", 0))),
    ],
)
def test_a_killed_rank_is_named_in_bounded_time(tmp_path: Path, phase: str, who: int) -> None:
    answers = run_ranks(3, _die, str(tmp_path), phase, who, timeout=BOUND, check=False)
    assert isinstance(answers.pop(who), RankDiedError)
    assert answers == [None, None]
    part = [path.stat().st_size for path in (tmp_path / "c").glob(".metadata.tmp.*")]
    assert len(part) == (phase in ("commit", "within the metadata")) and all(part)
    vescale_ckpt.save(tmp_path / "c", replicated(3))
    assert only_named_files(tmp_path / "c")


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2, timeout=BOUND)
def test_nothing_grows_from_save_to_save(tmp_path: Path, way: str) -> None:
    planner, load_planner = SavePlanner(), LoadPlanner()
    counts = []
    for k in range(10):
        state = replicated(k % 3)
        if k % 5 == 4:
            if dist.get_rank():
                state["bomb"] = _Bomb()
            with pytest.raises(ERRORS):
                save(way, f"{tmp_path}/c", state, planner)
        else:
            save(way, f"{tmp_path}/c", state, planner)
            dcp.load(replicated(0), storage_reader=StorageReader(f"{tmp_path}/c"), planner=load_planner)
        del state
        gc.collect()
        counts.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
    assert counts[-1][0] <= counts[3][0] + 1 and counts[-1][1] <= counts[3][1], counts
