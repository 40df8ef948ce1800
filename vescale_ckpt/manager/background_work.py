"""`BackgroundWork` is a manager's work in a thread, which a process that ends waits for."""

from __future__ import annotations

import atexit
import os
import threading
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Any, Generic, TypeVar

from .. import settings
from .._collective.background import process_is_ending
from .._engine.live_objects import LiveObjects

Work = TypeVar("Work")


class BackgroundWork(ABC, Generic[Work]):
    """A thread that lives while there is work. A forked child has none of the threads, and waits for none."""

    def __init__(self, name: str) -> None:
        self._name = name  # of the thread
        self._changed = threading.Condition()  # guards `_thread`, and what subclasses say
        self._thread: threading.Thread | None = None
        self._is_reserved = False
        _alive.add(self)

    @abstractmethod
    def _next_work(self) -> Work | None:
        """Called with `_changed` held. None ends the thread."""

    @abstractmethod
    def _do(self, work: Work) -> None:
        """Raises nothing."""

    @abstractmethod
    def end_within(self, seconds: float) -> None:
        """Waits for the end of the work, also when the process ends. If that takes longer, says what is left undone."""

    def reserve(self) -> None:
        """Notes that a save that runs will bring work. All ranks do so, while all are idle."""
        self._is_reserved = True

    def is_idle(self) -> bool:
        """Whether nothing is left to do, nor will be when a running save ends."""
        with self._changed:
            return self._thread is None and not self._is_reserved

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until nothing is left to do. False if that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None, timeout)

    def _begin(self) -> None:
        """Starts the thread, if there is none."""
        with self._changed:
            if self._thread is not None:
                return
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            if not (ending := process_is_ending()):
                self._thread.start()
        if ending:  # nothing would wait for a thread; but the process waits for the save that calls this
            self._run()

    def _run(self) -> None:
        while True:
            with self._changed:
                if (work := self._next_work()) is None:
                    self._thread = None
                    self._changed.notify_all()
                    return
            self._do(work)


_alive: LiveObjects[BackgroundWork[Any]] = LiveObjects()


def _end_all() -> None:
    until = time.monotonic() + settings.number("exit_timeout")
    for work in _alive:
        with suppress(Exception):
            work.end_within(max(0.0, until - time.monotonic()))


atexit.register(_end_all)
os.register_at_fork(after_in_child=_alive.clear)
