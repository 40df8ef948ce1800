"""Processes that are killed: children at a moment that they tell their parent of, or before a call that is counted."""

from __future__ import annotations

import ctypes
import functools
import itertools
import mmap
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

BOUND = 120.0  # seconds


class Shared:
    """Numbers that children write and their parent reads: each by one store, so that none is torn by a kill."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.numbers = (ctypes.c_int64 * count).from_buffer(mmap.mmap(-1, 8 * count))

    def __setitem__(self, index: int, value: int) -> None:
        self.numbers[index] = value

    def __getitem__(self, index: int) -> int:
        return int(self.numbers[index])


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
