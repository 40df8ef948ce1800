"""What an action costs, in numbers that other load on the machine does not change, or hardly."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import FrameType


def calls_of(action: Callable[[], object]) -> int:
    """How many functions Python calls, its own and those of C."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
    return calls


def least_cpu_seconds(action: Callable[[], object], rounds: int) -> float:
    """Of this process with all its threads."""
    taken = []
    for _ in range(rounds):
        started = time.process_time()
        action()
        taken.append(time.process_time() - started)
    return min(taken)
