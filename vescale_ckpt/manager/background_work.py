"""`BackgroundWork` is what a manager does in a thread beside the training, which a process that ends waits for.

`CommitCalls` calls a user's function there for each checkpoint that a manager has committed.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

from .. import settings
from .._checkpoint.native.file_names import METADATA_NAME
from .._collective.background import process_is_ending
from .._engine.live_objects import LiveObjects
from .._storage.open_storage import storage_at
from ..errors import CheckpointError, some

logger = logging.getLogger(__name__)

Work = TypeVar("Work")
OnCommit = Callable[[int, str], object]


class BackgroundWork(ABC, Generic[Work]):
    """Does one thing after another, in a thread that lives while there is work. A forked child has none of the threads,
    and waits for none."""

    def __init__(self, name: str) -> None:
        self.failures: dict[int, Exception] = {}  #: {step: error of its last work}
        self._name = name  # of the thread
        self._changed = threading.Condition()  # guards `_thread` and `_waiting`, and what subclasses say
        self._thread: threading.Thread | None = None
        self._waiting: deque[Work] = deque()
        self._is_reserved = False
        _alive.add(self)

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

    def raise_failures(self, text: Callable[[str], str], path: str) -> None:
        """Raises `CheckpointError` if work has failed. `text`: says that it has, given the steps."""
        failures, self.failures = self.failures, {}
        if failures:
            failure = next(iter(failures.values()))
            raise CheckpointError(f"{text(some([*map(str, failures)]))}: {failure}", path=path) from failure

    def _add(self, work: Work) -> None:
        with self._changed:
            self._waiting.append(work)
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
                if not self._waiting:
                    self._thread = None
                    self._changed.notify_all()
                    return
                work = self._waiting.popleft()
            self._do(work)


_alive: LiveObjects[BackgroundWork[Any]] = LiveObjects()


def _end_all() -> None:
    until = time.monotonic() + settings.number("exit_timeout")
    for work in _alive:
        with suppress(Exception):
            work.end_within(max(0.0, until - time.monotonic()))


atexit.register(_end_all)
os.register_at_fork(after_in_child=_alive.clear)


class CommitCalls(BackgroundWork[tuple[int, str]]):
    """The calls of one manager, one at a time, in the order of the commits. Only the coordinator has one.

    A checkpoint is not removed during its call, where the storage has locks. One that retention has removed before its
    turn is passed over.
    """

    def __init__(self, call: OnCommit) -> None:
        self._call = call
        super().__init__("vescale_ckpt on_commit")

    def begin(self, step: int, path: str) -> None:
        self._add((step, path))

    def end_within(self, seconds: float) -> None:
        """Waits until all calls are done. After so many seconds it warns, and those that have not begun are not
        made."""
        with self._changed:
            if not self.wait(seconds):
                logger.warning(
                    "on_commit has not returned after %.0f s: %d calls are not made", seconds, len(self._waiting)
                )
            self._waiting.clear()

    def _do(self, work: tuple[int, str]) -> None:
        step, path = work
        try:
            with storage_at(path).share(METADATA_NAME):
                if storage_at(path).has(METADATA_NAME):
                    self._call(step, path)
                else:
                    logger.warning("on_commit is not called for step %d, which retention has removed meanwhile", step)
            self.failures.pop(step, None)
        except Exception as error:
            self.failures[step] = error
            logger.warning("on_commit failed for step %d: %s: %s", step, type(error).__name__, error)
