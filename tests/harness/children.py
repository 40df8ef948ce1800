"""Forks of this process, for what may hang, crash, take all memory or is to be killed, and when they are killed: at a
moment that they tell their parent of, or before a call that is counted."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import itertools
import mmap
import os
import pickle
import resource
import select
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch

BOUND = 120.0  # seconds


class ChildError(AssertionError):
    """The child hung, died or raised."""


@dataclass(frozen=True)
class Answer:
    value: Any
    peak_bytes: int  #: of memory, above what the child began with


def in_child(function: Callable[..., Any], *args: Any, seconds: float = 120.0) -> Answer:
    """Calls a function in a fork of this process. Raises `ChildError` if it raises, dies or takes longer."""
    reading, writing = os.pipe()

    def answer() -> None:
        faulthandler.dump_traceback_later(0.9 * seconds, file=2)  # tells where it hangs
        _report(function, args, writing)

    pid = fork(answer)
    os.close(writing)
    data, deadline = b"", time.monotonic() + seconds
    try:
        while select.select([reading], [], [], max(0.0, deadline - time.monotonic()))[0]:
            piece = os.read(reading, 1 << 16)
            data += piece
            if not piece:
                break
        else:
            raise ChildError(f"{function.__name__} gave no answer within {seconds:.0f} s")
    finally:
        os.close(reading)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    if not data:
        raise ChildError(f"{function.__name__} died by signal {os.WTERMSIG(status)}")
    ok, value, peak = pickle.loads(data)
    if not ok:
        raise ChildError(value)
    return Answer(value, peak)


def fork(body: Callable[[], object]) -> int:
    """Runs `body` in a fork of this process, which then ends without a trace; returns its id."""
    pid = os.fork()
    if pid == 0:
        _run_and_end(body)
    return pid


def _run_and_end(body: Callable[[], object]) -> NoReturn:
    try:
        torch.set_num_threads(1)  # the parent's pool of threads did not come along
        body()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _report(function: Callable[..., Any], args: tuple[Any, ...], writing: int) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        answer = (True, function(*args))
    except BaseException:
        answer = (False, traceback.format_exc())
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    with os.fdopen(writing, "wb") as pipe:
        pipe.write(pickle.dumps((*answer, peak)))


class Shared:
    """Numbers that children write and their parent reads: each by one store, so that none is torn by a kill."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.numbers = (ctypes.c_int64 * count).from_buffer(mmap.mmap(-1, 8 * count))

    def __setitem__(self, index: int, value: int) -> None:
        self.numbers[index] = value

    def __getitem__(self, index: int) -> int:
        return int(self.numbers[index])


def wait_for(*paths: Path) -> None:
    """Until these files are there, which other processes make."""
    deadline = time.monotonic() + 2 * BOUND
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, f"{paths}: not there within {2 * BOUND:.0f} s"
        time.sleep(0.005)


def wait_until(numbers: Shared, exceed: int, what: str) -> None:
    deadline = time.monotonic() + BOUND
    while min(numbers[i] for i in range(numbers.count)) <= exceed:
        assert time.monotonic() < deadline, f"{what}: not within {BOUND:.0f} s"
        time.sleep(0.0005)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, f"it ended before: {status}"


@contextmanager
def killed_before(number: int, calls: Sequence[tuple[object, str]]) -> Iterator[None]:
    """Within it, this process is killed before its `number`th call, from 0, of any of the functions: owner and name."""
    count = itertools.count()

    def before(step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def counted(*arguments: Any, **options: Any) -> Any:
            if next(count) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return step(*arguments, **options)

        return counted

    with ExitStack() as patches:
        for owner, name in calls:
            patches.enter_context(mock.patch.object(owner, name, before(getattr(owner, name))))
        yield
