"""SIGKILL at any moment of a save: what is there afterwards is the old checkpoint or the new one, whole.

`VESCALE_CKPT_TEST_KILLS` sets how many processes the first test kills (the others in proportion).
"""

from __future__ import annotations

import functools
import os
import random
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.children import Shared, fork, kill, killed_before, wait_until
from harness.files import only_named_files
from harness.saves import load, outcome, save
from harness.states import change_all, same, state, state_of_rank, whole_state
from harness.steps import CHANGES_BY_THE_ENGINE, CHANGES_OF_FOLDERS

import vescale_ckpt
from vescale_ckpt import SavePlanner, StorageWriter, verify

KILLS = int(os.environ.get("VESCALE_CKPT_TEST_KILLS", "36"))
BOUND = 120.0  # seconds after which a process counts as hung


def await_end(pid: int, what: str) -> None:
    deadline = time.monotonic() + BOUND
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None and time.monotonic() < deadline:
        time.sleep(0.001)
    in_time = time.monotonic() < deadline
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert in_time, f"{what} did not end within {BOUND:.0f} s"


@pytest.mark.parametrize(
    "options",
    [{}, {"single_file_per_rank": False}, {"sync_files": False}],
    ids=["one file", "a file each", "without syncing"],
)
def test_a_killed_save_leaves_the_old_checkpoint_or_the_new_one(checkpoint: Path, options: dict[str, bool]) -> None:
    kills = KILLS if not options else max(1, KILLS // 4)
    kill_again_and_again(checkpoint, functools.partial(save_on_and_on, options), kills, **options)


def kill_again_and_again(
    checkpoint: Path, body: Callable[[Path, Shared], NoReturn], kills: int, **options: bool
) -> None:
    """Kills processes that save; between some kills, this process does, with these options."""
    rng = random.Random(1)
    save(checkpoint, state(0))
    last, committed = 0, Shared(1)
    left_something = 0
    for number in range(kills):
        committed[0] = last
        pid = fork(functools.partial(body, checkpoint, committed))
        if number % 8:  # else it may be killed before its first save
            wait_until(committed, last, "the first save of a child")
        time.sleep(rng.random() * 0.02)
        kill(pid)

        last = old_or_new(checkpoint, committed[0])
        left_something += not only_named_files(checkpoint)
        if number % 4 == 0:
            last += 1
            save(checkpoint, state(last), **options)
            assert only_named_files(checkpoint)
            assert outcome(checkpoint, state(last)) is None
    if kills >= 30:
        assert left_something > kills // 20, "hardly any process was killed while it saved"


def old_or_new(checkpoint: Path, sure: int) -> int:
    """Which save was loaded: the one that is known to be durable, or the next, and nothing of another."""
    values = load(checkpoint, state(0))
    last: int = values["step"]
    assert last in (sure, sure + 1), f"save {sure} was durable, {last} was loaded"
    assert same(values, state(last)), "a mixture of two saves, or of a save and what came after it"
    return last


def save_on_and_on(options: dict[str, bool], directory: Path, committed: Shared) -> NoReturn:
    k = committed[0]
    while True:
        k += 1
        save(directory, state(k), **options)
        committed[0] = k


def test_a_process_killed_while_it_saves_in_the_background_leaves_the_old_checkpoint_or_the_new_one(
    checkpoint: Path,
) -> None:
    """Training changes the state meanwhile."""

    def train_for_ever(directory: Path, committed: Shared) -> NoReturn:
        k = committed[0]
        while True:
            k += 1
            values = state(k)
            handle = vescale_ckpt.save(directory, values, async_checkpoint=True)

            def done(handle: vescale_ckpt.SaveHandle, k: int = k) -> None:
                if handle.exception() is None:
                    committed[0] = k

            handle.add_done_callback(done)
            change_all(values)

    kill_again_and_again(checkpoint, train_for_ever, max(1, KILLS * 4 // 9))


def test_a_kill_before_any_change_of_the_folder_leaves_the_old_checkpoint_or_the_new_one(checkpoint: Path) -> None:
    save(checkpoint, state(0))
    last, killed = 0, 0
    for number in range(100):

        def body(number: int = number, new: int = last + 1) -> None:
            with killed_before(number, CHANGES_BY_THE_ENGINE + CHANGES_OF_FOLDERS):
                save(checkpoint, state(new))

        _, status = os.waitpid(fork(body), 0)
        last = old_or_new(checkpoint, last)
        assert verify(checkpoint).ok
        if not os.WIFSIGNALED(status):
            break
        killed += 1
    else:
        pytest.fail("the save never ended")
    assert killed >= 5 and only_named_files(checkpoint)


# --- Two ranks


def save_for_ever(directory: Path, store: Path, committed: Shared, rank: int) -> NoReturn:
    # A rank that is left alone must not wait for half an hour, gloo's own limit.
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=BOUND / 2)
    )
    k = committed[rank]
    writer, planner = StorageWriter(directory), SavePlanner()
    while True:
        k += 1
        dcp.save(state_of_rank(k), storage_writer=writer, planner=planner)
        committed[rank] = k


@pytest.mark.parametrize("victims", [(0, 1), (1, 0), (0,), (1,)], ids=["both", "both, 1 first", "rank 0", "rank 1"])
def test_killed_ranks_leave_the_old_checkpoint_or_the_new_one(
    checkpoint: Path, tmp_path: Path, victims: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    rng = random.Random(2)
    save(checkpoint, whole_state(0))
    last, committed = 0, Shared(2)
    for number in range(max(1, KILLS // 18)):
        committed[0] = committed[1] = last
        begin = functools.partial(save_for_ever, checkpoint, tmp_path / f"store {number}", committed)
        pids = [fork_silently(functools.partial(begin, rank)) for rank in (0, 1)]
        try:
            wait_until(committed, last, "the first save of two ranks")
            time.sleep(rng.random() * 0.03)
        finally:
            for victim in victims:
                os.kill(pids[victim], signal.SIGKILL)
            for rank in (0, 1):
                await_end(pids[rank], f"rank {rank}" + ("" if rank in victims else ", left alone,"))

        sure = max(committed[0], committed[1])
        values = load(checkpoint, whole_state(0))
        last = values["step"]
        assert sure <= last <= sure + 1
        assert same(values, whole_state(last)), "a mixture of two saves"
        if number % 3 == 0:
            last += 1
            save(checkpoint, whole_state(last))
            assert only_named_files(checkpoint)


def fork_silently(body: Callable[[], object]) -> int:
    """What a rank prints when its peer dies is expected."""

    def quiet() -> None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        body()

    return fork(quiet)
