"""Memory of snapshots, and asynchronous saves that are held up: their copies, or their writing in the background."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

from vescale_ckpt._engine import _C
from vescale_ckpt._write.snapshot import StagedPlan

BOUND = 120.0


@contextmanager
def late_copies(begin: threading.Event | None = None) -> Iterator[threading.Event]:
    """A context in which copies behind a gate begin when the event is set, and not before. Its end sets the event."""
    event = begin or threading.Event()
    start, wait = _C.Snapshot.start, _C.Snapshot.wait
    waiting = set[int]()

    def start_later(snapshot: Any) -> None:
        waiting.add(id(snapshot))

    def wait_for_event(snapshot: Any) -> None:
        if id(snapshot) in waiting:
            assert event.wait(BOUND)
            waiting.discard(id(snapshot))
            start(snapshot)
        wait(snapshot)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_C.Snapshot, "start", start_later)
        patch.setattr(_C.Snapshot, "wait", wait_for_event)
        try:
            yield event
        finally:
            event.set()


@contextmanager
def held() -> Iterator[threading.Event]:
    """Background writing waits for this event."""
    event = threading.Event()
    write = StagedPlan.write

    def late(part: StagedPlan) -> Any:
        assert event.wait(BOUND)
        return write(part)

    with mock.patch.object(StagedPlan, "write", late):
        try:
            yield event
        finally:
            event.set()


def no_snapshot_is_left(seconds: float = 60.0) -> bool:
    """Whether all memory for snapshots is free, perhaps after garbage and other threads have let go of it."""
    deadline = time.monotonic() + seconds
    while snapshot_memory()["in_use_bytes"]:
        if time.monotonic() > deadline:
            return False
        gc.collect()
        time.sleep(0.001)
    return True


def snapshot_memory() -> dict[str, int]:
    """Bytes of memory for snapshots: in use, and touched."""
    return _C.snapshot_memory()
