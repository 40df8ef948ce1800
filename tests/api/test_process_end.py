"""Processes that end while a save goes on, or after one that failed and that nobody asked about."""

from __future__ import annotations

import atexit
import contextlib
import errno
import gc
import json
import multiprocessing
import multiprocessing.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness import faults, saves, steps
from harness.files import only_named_files
from harness.ranks import forks
from harness.states import small_state

import vescale_ckpt
from vescale_ckpt import CheckpointError, CheckpointManager

BOUND = 120.0


def save_in_background(directory: Path) -> None:
    """A save that does not begin to write before the process ends."""

    def late(_: Any) -> None:
        deadline = time.monotonic() + BOUND
        while not multiprocessing.util._exiting and time.monotonic() < deadline:  # type: ignore[attr-defined]
            time.sleep(0.001)

    steps.before("write what was staged", late).start()
    handle = vescale_ckpt.save(directory, small_state(1), async_checkpoint=True)
    assert not handle.done()


def manage_in_background(directory: Path) -> None:
    saver = CheckpointManager(directory, max_to_keep=1)
    saver.save(1, small_state(1))
    saver.wait()
    steps.before("write what was staged", lambda _: time.sleep(0.05)).start()
    saver.save(2, small_state(2))


def fail_in_background(directory: Path) -> None:
    faults.inject("sync", errno.EIO, 0, 10**6)
    vescale_ckpt.save(directory, small_state(1), async_checkpoint=True)


def fail_and_exit(directory: Path) -> None:
    fail_in_background(directory)
    sys.exit(3)


def fail_and_ask(directory: Path) -> None:
    faults.inject("sync", errno.EIO, 0, 10**6)
    with contextlib.suppress(CheckpointError):
        vescale_ckpt.save(directory, small_state(1), async_checkpoint=True).result(BOUND)


def exit_code(context: Any, function: Callable[[Path], None], directory: Path) -> int | None:
    process = context.Process(target=function, args=(directory,))
    process.start()
    process.join(BOUND)
    if process.exitcode is None and process.pid is not None:
        os.kill(process.pid, signal.SIGABRT)  # a forked child then writes its stacks, as pytest's processes do
        process.join(BOUND)
    code: int | None = process.exitcode
    return code


# --- Children of multiprocessing


@pytest.mark.parametrize("kind", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_child_finishes_its_save(checkpoint: Path, kind: str) -> None:
    context = forks() if kind == "forkserver" else multiprocessing.get_context(kind)
    assert exit_code(context, save_in_background, checkpoint) == 0
    assert saves.loads(checkpoint, small_state(1))


def test_a_child_removes_what_its_last_save_supersedes(checkpoint: Path) -> None:
    assert exit_code(forks(), manage_in_background, checkpoint) == 0
    assert os.listdir(checkpoint) == ["step-2"] and saves.loads(checkpoint / "step-2", small_state(2))


@pytest.mark.parametrize(("function", "code"), [(fail_in_background, 1), (fail_and_exit, 3), (fail_and_ask, 0)])
def test_a_child_whose_save_failed_unseen(checkpoint: Path, function: Callable[[Path], None], code: int) -> None:
    assert exit_code(forks(), function, checkpoint) == code


# --- What a process remembers of its saves


def test_saves_begin_while_others_end() -> None:
    """Each of several threads saves to a directory of its own."""
    before = set(steps.background._notices)

    def begin_and_end(_: int) -> None:
        for _ in range(300):
            notices = [steps.Notice() for _ in range(20)]
            for notice in notices:
                steps.background._add_save(notice)
            for notice in notices:
                steps.background._notices.discard(notice)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(3) as pool:
            assert [*pool.map(begin_and_end, range(3))] == [None] * 3
    finally:
        sys.setswitchinterval(interval)
    assert steps.background._notices == before


# --- The exit status


def fail_and_look(directory: Path) -> None:
    faults.inject("sync", errno.EIO, 0, 10**6)
    assert vescale_ckpt.save(directory, small_state(1), async_checkpoint=True).exception(BOUND) is not None


def fail_and_be_told(directory: Path) -> None:
    fail_in_background(directory)
    with contextlib.suppress(CheckpointError):
        vescale_ckpt.save(directory, small_state(2))


def fail_in_manager(directory: Path) -> None:
    faults.inject("sync", errno.EIO, 0, 10**6)
    CheckpointManager(directory).save(1, small_state(1))


def fail_in_manager_and_wait(directory: Path) -> None:
    faults.inject("sync", errno.EIO, 0, 10**6)
    saver = CheckpointManager(directory)
    saver.save(1, small_state(1))
    with contextlib.suppress(CheckpointError):
        saver.wait()


def fail_in_manager_that_warns(directory: Path) -> None:
    faults.inject("sync", errno.EIO, 0, 10**6)
    CheckpointManager(directory, on_error="warn").save(1, small_state(1))


def finish(directory: Path) -> None:
    vescale_ckpt.save(directory, small_state(1))
    steps.before("write what was staged", lambda _: time.sleep(0.5)).start()
    vescale_ckpt.save(directory, small_state(2), async_checkpoint=True)


def finish_and_raise(directory: Path) -> None:
    finish(directory)
    raise ValueError("the trainer fails")


def give_up(directory: Path, timeout: str = "1") -> None:
    vescale_ckpt.save(directory, small_state(1))
    os.environ["VESCALE_CKPT_EXIT_TIMEOUT"] = timeout
    steps.slow_background_writes().start()
    vescale_ckpt.save(directory, {"large": torch.zeros(8 << 20)}, async_checkpoint=True)


def give_up_on_purpose(directory: Path) -> None:
    give_up(directory, "0")


def cancel(directory: Path) -> None:
    vescale_ckpt.save(directory, small_state(1))
    steps.slow_background_writes().start()
    assert vescale_ckpt.save(directory, {"large": torch.zeros(8 << 20)}, async_checkpoint=True).cancel()


def give_up_before_it_writes(directory: Path) -> None:
    vescale_ckpt.save(directory, small_state(1))
    os.environ["VESCALE_CKPT_EXIT_TIMEOUT"] = "0"
    steps.before("write what was staged", lambda _: time.sleep(1)).start()
    vescale_ckpt.save(directory, small_state(2), async_checkpoint=True)


def save_while_ending(directory: Path) -> None:
    atexit._run_exitfuncs()  # what is registered before ours runs after it, and may save
    assert vescale_ckpt.save(directory, small_state(1), async_checkpoint=True).done()


def save_by_dcp_at_exit(directory: Path) -> None:
    # The last thing that a trainer does when it is told to stop.
    writer = vescale_ckpt.StorageWriter(directory)
    atexit.register(dcp.save, small_state(1), storage_writer=writer, planner=vescale_ckpt.SavePlanner())


CASES: dict[Callable[[Path], None], int] = {
    fail_in_background: 1,
    fail_and_exit: 3,
    fail_and_ask: 0,
    fail_and_look: 0,
    fail_and_be_told: 0,
    fail_in_manager: 1,
    fail_in_manager_and_wait: 0,
    fail_in_manager_that_warns: 0,
    finish: 0,
    finish_and_raise: 1,
    give_up: 1,
    give_up_on_purpose: 0,
    give_up_before_it_writes: 0,
    cancel: 0,
    save_while_ending: 0,
    save_by_dcp_at_exit: 0,
}


def end_in_every_way(directory: str) -> None:
    """Prints the exit statuses of all cases, forks of this interpreter that end as interpreters do."""
    pids = {}
    gc.freeze()  # half of what ending costs
    for function in CASES:
        pid = pids[function.__name__] = os.fork()
        if pid == 0:
            torch.set_num_threads(1)
            function(Path(directory, function.__name__))
            sys.stdout.write(f"{function.__name__}\n")  # at once: other cases end at the same time
            return
    print(json.dumps({name: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for name, pid in pids.items()}))


def test_the_exit_status_tells_of_a_save_that_failed_unseen(tmp_path: Path) -> None:
    code = "import sys, test_process_end; test_process_end.end_in_every_way(sys.argv[1])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).resolve().parents[1]), *sys.path])}
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=3 * BOUND
    )
    assert result.returncode == 0, result.stderr
    *printed, statuses = result.stdout.splitlines()
    assert json.loads(statuses) == {function.__name__: status for function, status in CASES.items()}, result.stderr
    # What was printed before is there, though another status took the place of 0.
    assert set(printed) == {function.__name__ for function in CASES} - {"fail_and_exit", "finish_and_raise"}
    stored = {"finish": 2, "finish_and_raise": 2, "give_up": 1, "give_up_on_purpose": 1}
    stored |= {"give_up_before_it_writes": 1, "cancel": 1}
    stored |= {"save_while_ending": 1, "save_by_dcp_at_exit": 1}
    assert [name for name, k in stored.items() if not saves.loads(tmp_path / name, small_state(k))] == []
    assert only_named_files(tmp_path / "cancel")
    vescale_ckpt.save(tmp_path / "give_up", small_state(3))
    assert only_named_files(tmp_path / "give_up")
    assert "given up" in result.stderr
    assert "failed, and nobody asked: if this process ends with status 0, that becomes 1" in result.stderr
    assert "status 0 of this process becomes" not in result.stderr, "some of them end with another status anyway"
