"""Holds up the copies of asynchronous saves that are behind a gate."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from vescale_ckpt._engine import _C

BOUND = 60.0


@contextmanager
def late_copies(begin: threading.Event | None = None) -> Iterator[threading.Event]:
    """A context in which copies behind a gate begin when the event is set, and not before. Its end sets the event."""
    event = begin or threading.Event()
    start, wait = _C.Snapshot.start, _C.Snapshot.wait
    waiting = set[int]()

    def start_later(snapshot: Any) -> None:
        waiting.add(id(snapshot))

    def wait_for_event(snapshot: Any, timeout: float | None) -> Any:
        if id(snapshot) in waiting:
            assert event.wait(BOUND)
            waiting.discard(id(snapshot))
            start(snapshot)
        return wait(snapshot, timeout)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_C.Snapshot, "start", start_later)
        patch.setattr(_C.Snapshot, "wait", wait_for_event)
        try:
            yield event
        finally:
            event.set()
