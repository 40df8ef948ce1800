"""`CommitCalls` calls a user's function in a thread for each checkpoint that a manager has committed."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable

from .. import settings
from .._checkpoint.native.file_names import METADATA_NAME
from .._collective import at_exit
from .._engine.live_objects import LiveObjects
from .._storage.open_storage import storage_at

logger = logging.getLogger(__name__)

OnCommit = Callable[[int, str], object]


class CommitCalls:
    """The calls of one manager, one at a time, in the order of the commits. Only the coordinator has one.

    A checkpoint is not removed during its call, where the storage has locks. One that retention has removed before its
    turn is passed over.
    """

    def __init__(self, call: OnCommit) -> None:
        self.failures: dict[int, Exception] = {}  #: {step: error of its last call}
        self._call = call
        self._changed = threading.Condition()  # guards the attributes below
        self._waiting: deque[tuple[int, str]] = deque()
        self._thread: threading.Thread | None = None
        _running.add(self)

    def begin(self, step: int, path: str) -> None:
        with self._changed:
            self._waiting.append((step, path))
            if self._thread is not None:
                return
            self._thread = threading.Thread(target=self._run, name="vescale_ckpt on_commit", daemon=True)
            if not (ending := at_exit.process_is_ending()):
                self._thread.start()
        if ending:  # nothing would wait for a thread; but the process waits for the save that calls this
            self._run()

    def finish(self, seconds: float) -> None:
        """Waits until all calls are done. After so many seconds it warns, and those that have not begun are not
        made."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._thread is None, seconds):
                logger.warning(
                    "on_commit has not returned after %.0f s: %d calls are not made", seconds, len(self._waiting)
                )
            self._waiting.clear()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._thread = None
                    self._changed.notify_all()
                    return
                step, path = self._waiting.popleft()
            try:
                self._call_for(step, path)
                self.failures.pop(step, None)
            except Exception as error:
                self.failures[step] = error
                logger.warning("on_commit failed for step %d: %s: %s", step, type(error).__name__, error)

    def _call_for(self, step: int, path: str) -> None:
        lock = storage_at(path).share(METADATA_NAME)
        try:
            if storage_at(path).has(METADATA_NAME):
                self._call(step, path)
            else:
                logger.warning("on_commit is not called for step %d, which retention has removed meanwhile", step)
        finally:
            if lock is not None:
                lock.release()


_running: LiveObjects[CommitCalls] = LiveObjects()


def _finish_at_exit() -> None:
    until = time.monotonic() + settings.number("exit_timeout")
    for calls in _running:
        with contextlib.suppress(Exception):
            calls.finish(max(0.0, until - time.monotonic()))


atexit.register(_finish_at_exit)
os.register_at_fork(after_in_child=_running.clear)  # a child has none of the threads
