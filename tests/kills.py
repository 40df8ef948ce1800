"""Children that are killed at a moment that they tell their parent of."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import time

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
